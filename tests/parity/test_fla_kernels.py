"""The GPU backends and the layers of flash-linear-attention itself, by Triton's interpreter.

Run with ``--fla=FOLDER``, a checkout; it needs einops. One test runs this file again in a process
in which the interpreter is switched on.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stateline.layers import HGRN2, GatedDeltaNet, GatedLinearAttention, Retention
from stateline.layers.base import SequenceLayer
from stateline.ops import delta_rule, linear_attention

pytestmark = pytest.mark.slow
INTERPRETED = os.environ.get("STATELINE_FLA_INTERPRETED") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of the first test")
BATCH, LENGTH, WIDTH, HEADS = 2, 41, 64, 2
ALIKE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.skipif(INTERPRETED, reason="is the process that it starts")
def test_kernels_and_layers_of_fla_agree_where_the_interpreter_runs_them(
    request: pytest.FixtureRequest,
) -> None:
    folder: Path | None = request.config.getoption("--fla")
    if folder is None:
        pytest.skip("no checkout of flash-linear-attention: name its folder with --fla=FOLDER")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-W", "ignore", f"--fla={folder}", __file__],
        env={**os.environ, "STATELINE_FLA_INTERPRETED": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.fixture(autouse=True)
def imported(request: pytest.FixtureRequest) -> None:
    if INTERPRETED and "fla" not in sys.modules:
        from tests.parity.fla_interpreted import import_fla

        import_fla(request.config.getoption("--fla"))
    torch.manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape)


@inside
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", ["per head", "per entry", "delta_rule"])
@torch.no_grad()
def test_our_backend_of_its_kernel_is_the_definition(op: str, packed: bool) -> None:
    length, keys, values = 70, 16, 16
    q, k = (nn.functional.normalize(drawn(length, HEADS, keys), dim=-1) for _ in "qk")
    v, state = drawn(length, HEADS, values), drawn(HEADS, keys, values)
    by_head, by_entry = (-torch.rand(BATCH, length, HEADS, *more) for more in ((), (keys,)))
    run: Callable[..., Any]
    run, given = {
        "per head": (linear_attention, (by_head, state)),
        "per entry": (linear_attention, (by_entry, state)),
        "delta_rule": (delta_rule, (by_entry, k.flip(1), -k, state)),
    }[op]
    starts = torch.zeros(BATCH, length, dtype=torch.bool)
    starts[0, 9], starts[1, 40] = True, True
    documents = {"starts": starts} if packed else {}
    theirs = import_module(f"stateline.ops.{run.__name__}.fla_backend")
    found = getattr(theirs, run.__name__)(q, k, v, *given, **documents)
    wanted = run(q, k, v, *given, backend="reference", **documents)
    torch.testing.assert_close(found, wanted, **ALIKE)


def joined(layer: nn.Module, *names: str) -> Tensor:
    """The rows of several maps."""
    return torch.cat([layer.get_submodule(name).weight for name in names])


def gated_linear_attention(theirs: Any) -> SequenceLayer[Any]:
    ours = GatedLinearAttention(WIDTH, n_heads=HEADS)
    ours.in_proj.weight.copy_(joined(theirs, "q_proj", "k_proj", "v_proj", "g_proj", "gk_proj.0"))
    ours.decay_proj.load_state_dict(theirs.gk_proj[1].state_dict())
    ours.norm.weight.copy_(theirs.g_norm_swish_gate.weight)
    return ours


def hgrn2(theirs: Any) -> SequenceLayer[Any]:
    ours = HGRN2(WIDTH, n_heads=HEADS)
    ours.in_proj.weight.copy_(joined(theirs, "q_proj", "f_proj", "i_proj"))
    ours.norm.weight.copy_(theirs.g_norm.weight)
    return ours


def retention(theirs: Any) -> SequenceLayer[Any]:
    ours = Retention(WIDTH, n_heads=HEADS)
    ours.in_proj.weight.copy_(joined(theirs, "q_proj", "k_proj", "v_proj", "g_proj"))
    ours.norm.weight.copy_(theirs.g_norm_swish_gate.weight)
    return ours


def delta_product(theirs: Any) -> SequenceLayer[Any]:
    ours = GatedDeltaNet(WIDTH, n_heads=HEADS, d_key=16, n_products=2, reflects=True)
    maps = ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj")
    ours.in_proj.weight.copy_(joined(theirs, *maps))
    ours.conv.kernel.copy_(joined(theirs, *(f"{n}_conv1d" for n in "qkv"))[:, 0].flip(-1))
    ours.a_log.copy_(theirs.A_log)
    ours.dt_bias.copy_(theirs.dt_bias)
    ours.norm.weight.copy_(theirs.o_norm.weight)
    return ours


@inside
@pytest.mark.parametrize(
    ("name", "options", "copied"),
    [
        ("GatedLinearAttention", {}, gated_linear_attention),
        ("HGRN2Attention", {"expand_ratio": None}, hgrn2),
        ("MultiScaleRetention", {}, retention),
        (
            "GatedDeltaProduct",
            {"head_dim": 16, "num_householder": 2, "allow_neg_eigval": True},
            delta_product,
        ),
    ],
)
@torch.no_grad()
def test_a_layer_is_its_layer(
    name: str, options: dict[str, Any], copied: Callable[[Any], SequenceLayer[Any]]
) -> None:
    make = getattr(import_module("fla.layers"), name)
    theirs = make(hidden_size=WIDTH, num_heads=HEADS, **options).eval()
    for weight in theirs.parameters():
        weight.add_(0.2 * torch.randn_like(weight))
    ours: Any = copied(theirs)
    ours.out_proj.weight.copy_(theirs.o_proj.weight)
    x = drawn(LENGTH, WIDTH)
    wanted = theirs(x)[0]
    torch.testing.assert_close(ours(x), wanted, **ALIKE)
    _, state = ours.forward_chunk(x[:, :-1], ours.init_state(BATCH))
    torch.testing.assert_close(ours.step(x[:, -1], state)[0], wanted[:, -1], **ALIKE)


@torch.no_grad()
def written_rwkv7(folder: Path) -> Any:
    """A tiny model whose tensors all matter; its folder is ``hf``."""
    from stateline.models.convert.table import load_pretrained, write_pretrained
    from tests.models.published import FOLDERS

    import_module("fla.models")  # which adds its classes to transformers
    FOLDERS["rwkv7"](folder / "first")
    model = load_pretrained(folder / "first")
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.2)
    write_pretrained(model, folder / "hf", "rwkv7")
    return model


@inside
@torch.no_grad()
def test_greedy_decoding_of_an_rwkv7_gives_the_tokens_of_its_class(tmp_path: Path) -> None:
    from tests.models.published import assert_near, tokens

    model = written_rwkv7(tmp_path)
    official = import_module("fla.models").RWKV7ForCausalLM.from_pretrained(tmp_path / "hf").eval()
    row = tokens(batch=1, length=4)
    logits, state = model.forward_chunk(row, model.init_state(1))
    found = [logits]
    for _ in range(48):
        row = torch.cat([row, logits[:, -1:].argmax(dim=-1)], dim=1)
        y, state = model.step(row[:, -1], state)
        found.append(logits := y[:, None])
    wanted = official(row).logits
    assert_near(torch.cat(found, dim=1), wanted, 1e-5)
    assert wanted[0, 3:-1].argmax(dim=-1).equal(row[0, 4:])


@inside
def test_no_field_of_an_rwkv7_is_ignored_that_its_class_reads(tmp_path: Path) -> None:
    from tests.models.test_fields import outcomes_of

    written_rwkv7(tmp_path)
    outcomes = outcomes_of(tmp_path / "hf", 1e-5)
    print({outcome: len(changes) for outcome, changes in outcomes.items()})  # noqa: T201
    assert len(outcomes["equal"]) > 10
