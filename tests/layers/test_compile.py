"""``torch.compile`` finds one graph in every layer, and changes no result.

What ``torch.export`` traces once takes other numbers of rows and tokens.

Staircases read on the host where each row is in its chunk, so only their ``forward`` is one graph.

The layers are compiled in a process of their own, which runs this file: with the annotations
checked, as in tests, nothing could be traced.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from stateline.generate import generate
from stateline.layers import ATTENTION_WRAPPERS, LAYERS, NOT_CAUSAL, WRAPPERS, AnyLayer
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.ops import feed_forward
from stateline.ops.pointwise import FeedForwardWeights
from stateline.ops.positions import rotate

VERBS = ("forward", "forward_chunk", "step")
UNROLLED = ("aft", "block_recurrent", "mlstm", "s4", "s5")
"""Layers with a loop whose passes the length counts: their graphs hold for some lengths alone."""
EXPORTED = [name for name in LAYERS if name not in UNROLLED]


@pytest.fixture(scope="module")
def outcome() -> dict[str, Any]:
    """Error of each compiled verb, or what went wrong."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        (name, verb)
        for name in (*LAYERS, *WRAPPERS)
        for verb in (VERBS[:1] if name in NOT_CAUSAL else VERBS)
    ],
)
@pytest.mark.slow
def test_a_compiled_layer_equals_the_layer(outcome: dict[str, Any], name: str, verb: str) -> None:
    assert outcome[f"{name}.{verb}"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.slow
def test_an_exported_layer_takes_other_rows_and_lengths(outcome: dict[str, Any], name: str) -> None:
    assert outcome[f"{name}.export"] == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_a_graph_takes_its_angles_from_one_node(outcome: dict[str, Any]) -> None:
    # A graph of single functions would compute a sine for each row and head that is rotated by it.
    assert outcome["rotate"] == pytest.approx(0, abs=1e-6)
    assert outcome["rotate.sines"] == 0


@pytest.mark.slow
def test_compiled_gelu_equals_gelu(outcome: dict[str, Any]) -> None:
    assert outcome["feed_forward"] == pytest.approx(0, abs=1e-12)


@pytest.mark.slow
def test_compiled_generation_gives_the_same_tokens(outcome: dict[str, Any]) -> None:
    assert outcome["generate"] == 0


def make(name: str) -> AnyLayer:
    if name in LAYERS:
        return LAYERS[name](8).double()
    core = "attention" if name in ATTENTION_WRAPPERS else "h3"
    return WRAPPERS[name](LAYERS[core](8)).double()


def with_gradients(layer: AnyLayer, forward: Callable[..., Any], x: torch.Tensor) -> Any:
    x = x.clone().requires_grad_()
    y = forward(x)
    return y, torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])


def runs(layer: AnyLayer) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """Each verb, and what is to be done with it, plain or compiled."""
    x = layer.example_input(2, 7)
    yield "forward", layer.forward, lambda verb: with_gradients(layer, verb, x)
    if not layer.causal:
        return
    state = layer.forward_chunk(x[:, :3], layer.init_state(2))[1]
    yield "forward_chunk", layer.forward_chunk, torch.no_grad()(lambda verb: verb(x, state))
    yield "step", layer.step, torch.no_grad()(lambda verb: verb(x[:, 0], state))


def difference(found: Any, wanted: Any) -> float:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@torch.no_grad()
def change_by_export(layer: AnyLayer) -> float:
    module, sizes = torch.nn.Sequential(layer), dict.fromkeys(range(2), torch.export.Dim.DYNAMIC)
    exported = torch.export.export(module, (layer.example_input(2, 7),), dynamic_shapes=(sizes,))
    x = layer.example_input(3, 70)
    return difference(exported.module()(x), layer(x))


def of_functions() -> dict[str, float]:
    """Errors of compiled functions, and how many sines the graph of a rotation computes."""
    graphs: list[Any] = []
    x, far = torch.randn(2, 3, 4, 8), torch.tensor([[3, 4095, 10**7]])
    turn = partial(rotate, dims=6)
    compiled = torch.compile(turn, backend=lambda graph, _: graphs.append(graph) or graph)
    sizes, x64 = [(12, 8), (12,), (8, 12), (8,)], torch.randn(5, 8).double()
    weights = FeedForwardWeights(*(torch.randn(size).double() for size in sizes))
    mapped = torch.compile(feed_forward, backend="aot_eager")
    model, prompt = LanguageModel(ModelConfig("h3", vocab_size=9, d_model=8)).eval(), far[:, :1]
    return {
        "generate": difference(
            torch.compile(generate)(model, prompt, 4), generate(model, prompt, 4)
        ),
        "rotate": difference(compiled(x, far), turn(x, far)),
        "rotate.sines": sum("sin" in str(n.target) for g in graphs for n in g.graph.nodes),
        "feed_forward": difference(mapped(x64, weights), feed_forward(x64, weights)),
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    errors: dict[str, float | str] = {}
    for name in (*LAYERS, *WRAPPERS):
        for verb, function, use in runs(make(name)):
            torch.compiler.reset()
            one_graph = verb == "forward" or "staircase" not in name
            compiled = partial(torch.compile, fullgraph=one_graph, backend="aot_eager")
            try:
                errors[f"{name}.{verb}"] = difference(use(compiled(function)), use(function))
            except Exception as error:
                errors[f"{name}.{verb}"] = str(error)
    for name in EXPORTED:
        try:
            errors[f"{name}.export"] = change_by_export(make(name))
        except Exception as error:
            errors[f"{name}.export"] = str(error)
    print(json.dumps(errors | of_functions()))  # noqa: T201


if __name__ == "__main__":
    main()
