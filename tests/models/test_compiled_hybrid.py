"""A hybrid is one graph for ``torch.compile``, with our ops as nodes, and gives the same numbers.

It is compiled in a process of its own, which runs this file: with the annotations checked, as in
tests, nothing could be traced.
"""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

PATTERN = "h3 attention(position=hard_alibi) s4d mamba gated_delta_net long_conv"


@pytest.mark.slow
def test_a_compiled_hybrid_is_one_graph_with_equal_outputs_and_gradients() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["graphs"] == 1
    assert {"diagonal_ssm_kernel", "selective_scan_kernel", "fft_conv"} <= set(found["ops"])
    assert found["output"] < 1e-9
    assert found["gradient"] < 1e-9


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(PATTERN, vocab_size=17, d_model=16)).double()
    tokens = torch.randint(17, (2, 23))
    names: list[set[str]] = []

    def note(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        nodes = {str(node.target) for node in graph.graph.nodes}
        names.append({n.split(".")[1] for n in nodes if n.startswith("stateline.")})
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)  # type: ignore[no-untyped-call]

    def run(forward: Any) -> tuple[torch.Tensor, ...]:
        y = forward(tokens)
        return y.detach(), *torch.autograd.grad(y.square().sum(), list(model.parameters()))

    compiled = run(torch.compile(model, backend=note))  # first: no op has been called before
    (found, *others), (wanted, *own) = compiled, run(model)
    gradient = max(float((a - b).abs().max()) for a, b in zip(own, others, strict=True))
    output = float((found - wanted).abs().max())
    outcome = {"graphs": len(names), "ops": sorted(set().union(*names))}
    print(json.dumps(outcome | {"output": output, "gradient": gradient}))  # noqa: T201


if __name__ == "__main__":
    main()
