"""Selective scan, Mamba and Mamba-2, from the official code and from Hugging Face."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.layers import Residual
from stateline.models.convert import mamba
from stateline.models.convert.table import load_pretrained, read_pretrained
from stateline.models.language_model import LanguageModel, LanguageModelState
from stateline.ops import use_backend
from tests.ops.flat import selective_scan
from tests.parity.cases import Case, covers, here
from tests.parity.models import assert_decodes, assert_near

MODELS = ("mamba", "mamba2", "mamba_ssm")


WITHOUT: dict[str, set[str]] = {
    "var_full": set(),
    "var_noz": {"z"},
    "var_nosoftplus": {"z", "D", "bias", "softplus"},
    "const_BC": {"bias"},
    "grouped": set(),
}
"""What the official function leaves out in each variant, of what it does around the scan."""


def scan(v: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Output and last state of one variant; official signals have time last, after the groups."""
    without, delta = WITHOUT[name], v["delta"]
    dt = delta if "bias" in without else delta + v["delta_bias"][:, None]
    dt = dt.abs() if "softplus" in without else F.softplus(dt)
    vectors = []
    for letter in "BC":
        vector = v[f"{name}.{letter}"]
        vector = vector[:, None] if vector.ndim == 3 else vector
        constant = vector.ndim == 2  # one of each channel, for all times
        shape = len(dt), dt.shape[-1], -1, -1
        vectors.append(vector.expand(shape) if constant else vector.movedim(-1, 1))
    y, last = selective_scan(v["u"].mT, dt.mT, v["A"], *vectors)
    y = y.mT if "D" in without else y.mT + v["Dskip"][:, None] * v["u"]
    return (y if "z" in without else y * F.silu(v["z"])), last


@covers("selective_scan")
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_the_scan_gives_the_official_outputs_and_states(case: Case, backend: str) -> None:
    v = case.tensors()
    for name in case.about["cases"]:
        with use_backend(backend):
            y, last = scan(v, name)
        assert_near(y, v[f"{name}.out"])
        assert_near(last, v[f"{name}.last_state"])


@covers("selective_scan")
def test_the_scan_has_the_official_gradients(case: Case) -> None:
    v = {name: tensor.requires_grad_() for name, tensor in case.tensors().items()}
    names = {n.removeprefix("grad."): n for n in v if n.startswith("grad.") and n != "grad.w"}
    inputs = [v[f"var_full.{name}" if name in "BC" else name] for name in names]
    loss = (scan(v, "var_full")[0] * v["grad.w"]).sum()
    for name, gradient in zip(names, torch.autograd.grad(loss, inputs), strict=True):
        assert_near(gradient, v[f"grad.{name}"].detach())


def load(case: Case) -> tuple[LanguageModel, dict[str, Tensor]]:
    found = read_pretrained(case.path.parent, device=here())
    assert found.format in mamba.CONVERTERS
    return found.model, case.tensors("vectors.safetensors")


@covers(*MODELS)
def test_a_published_model_gives_the_official_logits(case: Case) -> None:
    model, wanted = load(case)
    assert_near(model(wanted["tokens"]), wanted["logits"])


@covers(*MODELS)
def test_a_published_model_gives_them_in_pieces(case: Case) -> None:
    model, wanted = load(case)
    state, logits = model.init_state(len(wanted["tokens"])), []
    for piece in wanted["tokens"].split(5, dim=1):
        y, state = model.forward_chunk(piece, state)
        logits.append(y)
    assert_near(torch.cat(logits, dim=1), wanted["logits"])


@covers(*MODELS)
def test_a_published_model_gives_them_step_by_step(case: Case) -> None:
    model, wanted = load(case)
    state, logits = model.init_state(len(wanted["tokens"])), []
    for token in wanted["tokens"].unbind(dim=1):
        y, state = model.step(token, state)
        logits.append(y)
    assert_near(torch.stack(logits, dim=1), wanted["logits"])


@covers(*MODELS)
def test_a_published_model_decodes_the_official_tokens(case: Case) -> None:
    model, wanted = load(case)
    assert_decodes(model, wanted["tokens"], wanted["greedy_ids"])


@covers("mamba", "mamba2")
def test_a_published_model_has_the_official_hidden_states(case: Case) -> None:
    """Unlike its other models, transformers counts from after the first layer here."""
    model, wanted = load(case)
    h = model.embedding(wanted["tokens"])
    for number, link in enumerate(model.stack.links):
        h = link(h)
        assert_near(h, wanted[f"hidden_{number}"])
    assert_near(model.norm(h), wanted[f"hidden_{len(model.stack.links)}"])


def assert_states_near(state: LanguageModelState, wanted: dict[str, Tensor], prefix: str) -> None:
    """The official convolution keeps the latest input as well as those before it."""
    for number, layer in enumerate(state.layers):
        assert_near(layer.h, wanted[f"{prefix}_ssm_{number}"])
        assert_near(layer.conv.past.mT, wanted[f"{prefix}_conv_{number}"][..., 1:])


@covers("mamba", "mamba_ssm")
def test_a_prompt_leaves_the_official_states(case: Case) -> None:
    model, wanted = load(case)
    prompt = wanted["tokens"][:, : int(wanted["prefill_len"])]
    _, state = model.forward_chunk(prompt, model.init_state(len(prompt)))
    assert_states_near(state, wanted, "prefill" if case.kind == "mamba_ssm" else "cache")


@covers("mamba_ssm")
def test_the_whole_sequence_leaves_the_official_states(case: Case) -> None:
    model, wanted = load(case)
    _, state = model.forward_chunk(wanted["tokens"], model.init_state(len(wanted["tokens"])))
    assert_states_near(state, wanted, "final")


@covers("mamba_ssm")
def test_a_layer_gives_the_official_output(case: Case) -> None:
    model, wanted = load(case)
    first = model.stack.links[0]
    assert isinstance(first, Residual)
    assert_near(first.layer(wanted["mixer0_in"]), wanted["mixer0_out"])


@covers("mamba_ssm")
def test_pickled_weights_and_safetensors_are_the_same_model(case: Case) -> None:
    settings = json.loads((case.path.parent / "config.json").read_text(encoding="utf-8"))
    model, wanted = (
        load_pretrained(
            case.tensors("model_alltensors.safetensors"), settings=settings, device=here()
        ),
        load(case)[0],
    )
    tensors = model.state_dict()
    assert all(tensors[name].equal(tensor) for name, tensor in wanted.state_dict().items())
