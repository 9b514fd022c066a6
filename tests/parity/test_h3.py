"""H3: its layer, its shift SSM, its convolution, its language models and its toy languages."""

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.generate import generate
from stateline.layers import H3, ShiftSSM
from stateline.models.config import ModelConfig
from stateline.models.convert.expressible import check_expressible
from stateline.models.convert.h3 import HeadOrder
from stateline.models.convert.single_layers import read_layer
from stateline.models.convert.table import load_pretrained
from stateline.models.language_model import LanguageModel
from stateline.ops import fft_conv, short_conv
from stateline.ops.h3_core.pytorch import _read, _write
from stateline.tasks import AssociativeRecall, InductionHead
from tests.parity.cases import Case, covers, here

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def assert_near(found: Tensor, wanted: Tensor, limit: float = 2e-5) -> None:
    """The same but for rounding in float32, on the scale of the largest entry."""
    scale = max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(found, wanted, rtol=0, atol=limit * scale)


def named(tensors: Mapping[str, Tensor], prefix: str, suffix: str = "") -> dict[str, Tensor]:
    """Tensors with this prefix and suffix, without them."""
    return {
        name[len(prefix) : len(name) - len(suffix)]: tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix) and name.endswith(suffix)
    }


def walk(layer: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """One step after the other."""
    outputs = []
    for x_t in x.unbind(dim=1):
        y, state = layer.step(x_t, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def h3_layer(case: Case, head_order: HeadOrder = "pytorch") -> H3:
    """Our layer of the case's description, with the official weights."""
    about = case.about["config"]
    layer = H3(
        about["d_model"],
        d_state=about["d_state"],
        d_head=about["head_dim"],
        n_ssm=about.get("n_ssm"),
        discretization=about.get("disc", "bilinear"),
    )
    assert about.get("real_type", "exp") == "exp"  # H3's diagonal SSM has no other
    weights = named(case.tensors(), "param.")
    layer.load_state_dict(read_layer(f"h3_{head_order}", weights))
    return layer


class CutOff(nn.Module):
    """A state space model whose filter ends after some taps, as those of ``l_max`` do."""

    def __init__(self, ssm: nn.Module, taps: int) -> None:
        super().__init__()
        self.ssm, self.taps = ssm, taps

    def forward(self, x: Tensor) -> Tensor:
        impulse = torch.zeros(1, self.taps, x.shape[-1], dtype=x.dtype)
        impulse[:, 0] = 1
        return short_conv(x, self.ssm(impulse)[0].mT)


def in_parallel(layer: H3, case: Case, u: Tensor) -> Tensor:
    """The layer in parallel; with ``l_max``, its filters cut off, which ours does not do."""
    taps = case.about["config"].get("l_max")
    if taps is None:
        return layer(u)
    q, k, v = layer.qkv(u).chunk(3, dim=-1)
    heads = layer.diagonal.d_model
    kv = _write(CutOff(layer.shift, taps)(k), v, heads)
    return layer.out_proj(_read(q, CutOff(layer.diagonal, taps)(kv), heads))


def in_steps(layer: H3, case: Case, u: Tensor) -> Tensor:
    """The layer step by step."""
    return walk(layer, u, layer.init_state(len(u)))[0]


def after_a_prompt(layer: H3, case: Case, u: Tensor) -> Tensor:
    """The layer step by step after a piece in parallel."""
    prompt = case.about["config"]["prefill"]
    y, state = layer.forward_chunk(u[:, :prompt], layer.init_state(len(u)))
    return torch.cat([y, walk(layer, u[:, prompt:], state)[0]], dim=1)


WAYS: dict[str, tuple[HeadOrder, Callable[[H3, Case, Tensor], Tensor]]] = {
    "y": ("pytorch", in_parallel),
    "y_fastpath_ref": ("fused", in_parallel),
    "y_step": ("pytorch", in_steps),
    "y_step_patched_slowlayout": ("pytorch", in_steps),
    "y_step_patched_fastlayout": ("fused", in_steps),
    "y_prefill_step": ("pytorch", after_a_prompt),
}
"""Each official output, with the order of heads that it has, and our way to it."""


@covers("h3_layer")
def test_the_layer_gives_the_official_outputs_on_every_path(case: Case) -> None:
    tensors = case.tensors()
    outputs = {name for name in tensors if name[0] == "y" and not name.endswith("_f64")}
    assert outputs <= WAYS.keys()
    for name in outputs:
        order, way = WAYS[name]
        with torch.no_grad():
            assert_near(way(h3_layer(case, order), case, tensors["u"]), tensors[name])
            found = way(h3_layer(case, order).double(), case, tensors["u"].double())
        torch.testing.assert_close(found, tensors[f"{name}_f64"], **EXACT)


@covers("h3_layer")
def test_the_layer_has_the_official_gradients(case: Case) -> None:
    tensors, layer = case.tensors(), h3_layer(case).double()
    u = tensors["u"].double().requires_grad_()
    (in_parallel(layer, case, u) * tensors["dout"].double()).sum().backward()
    wanted = named(tensors, "grad.", "_f64")
    torch.testing.assert_close(u.grad, wanted.pop("u"), **EXACT)
    ours = read_layer("h3_pytorch", wanted)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, ours[name], **EXACT)


@covers("h3_layer")
def test_the_layer_ends_in_the_official_states(case: Case) -> None:
    tensors, layer = case.tensors(), h3_layer(case).double()
    u = tensors["u"].double()
    with torch.no_grad():
        for run in (walk, type(layer).forward_chunk):
            state = run(layer, u, layer.init_state(len(u)))[1]
            diagonal = state.diagonal.h.flatten(0, 2)
            torch.testing.assert_close(diagonal, tensors["final_state_f64"], **EXACT)
            shift = official_shift_state(layer.shift, state.shift.past)
            wanted = tensors["final_state_k_f64"][: len(u), :, :-1]
            torch.testing.assert_close(shift, wanted, **EXACT)


@covers("h3_layer", where=lambda case: case.about["config"].get("l_max"))
def test_the_official_length_limit_bounds_our_model(case: Case) -> None:
    limit, width = case.about["config"]["l_max"], case.about["config"]["d_model"]
    pattern = f"h3(d_state={case.about['config']['d_state']}, max_len={limit})"
    model = LanguageModel(ModelConfig(pattern, vocab_size=5, d_model=width))
    layer, tensors = model.stack.layers[0].layer, case.tensors()
    layer.load_state_dict(read_layer("h3_fused", named(tensors, "param.")))
    with torch.no_grad():
        assert_near(layer(tensors["u"][:, :limit]), tensors["y"][:, :limit])
    tokens = torch.zeros(1, limit + 1, dtype=torch.int64)
    assert model(tokens[:, 1:]).shape[1] == limit
    with pytest.raises(InputError, match=f"max_len={limit} tokens, got {limit + 1}"):
        model(tokens)


def shift_toeplitz(layer: ShiftSSM) -> Tensor:
    """The matrices (channel, n, j) whose products with the latest inputs, newest first, are states.

    Official states hold inputs that B has weighted; ours hold the inputs.
    """
    n = torch.arange(layer.b.shape[1])
    lag = n[:, None] - n
    return (layer.b[:, lag.clamp(min=0)] * (lag >= 0)).detach()


def official_shift_state(layer: ShiftSSM, past: Tensor) -> Tensor:
    """But for its last entry, which needs one input more, and which no later output needs."""
    weights = shift_toeplitz(layer)[:, :-1, :-1]
    return torch.einsum("dnj,bjd->bdn", weights, past.flip(1))


def shift_ssms(case: Case) -> Iterator[tuple[int, ShiftSSM]]:
    """One of ours for every filter of a channel, without the skip connection, in float64."""
    tensors = case.tensors()
    for number, c in enumerate(tensors["param.C"]):
        layer = ShiftSSM(len(c), d_state=c.shape[1]).double()
        weights = {"b": tensors["param.B"], "c": c, "skip": torch.zeros(len(c))}
        layer.load_state_dict(weights)
        yield number, layer


@covers("shift_kernel")
def test_the_shift_ssm_has_the_official_kernel(case: Case) -> None:
    for length in case.about["config"]["Ls"]:
        for number, layer in shift_ssms(case):
            wanted = case.tensors()[f"L{length}.kernel_f64"][number]
            taps = F.pad(layer.taps(), (0, length))[:, :length]
            torch.testing.assert_close(taps, wanted, **EXACT)


@covers("shift_kernel")
def test_the_shift_ssm_steps_as_the_official_one(case: Case) -> None:
    tensors = case.tensors()
    for length in case.about["config"]["Ls"]:
        for number, layer in shift_ssms(case):
            u = tensors[f"L{length}.u"].double().mT
            y, state = walk(layer, u, layer.init_state(len(u)))
            torch.testing.assert_close(y.mT, tensors[f"L{length}.step_y_f64"][:, number], **EXACT)
            found = official_shift_state(layer, state.past)
            wanted = tensors[f"L{length}.step_final_state_f64"][..., :-1]
            torch.testing.assert_close(found, wanted, **EXACT)


@covers("shift_kernel")
def test_the_shift_ssm_goes_on_from_an_official_state(case: Case) -> None:
    tensors = case.tensors()
    for length in case.about["config"]["Ls"]:
        for _, layer in shift_ssms(case):
            inverse = torch.linalg.inv(shift_toeplitz(layer))
            latest = torch.einsum("djn,bdn->bjd", inverse, tensors["state0"].double())
            before = layer.init_state(len(latest))._replace(past=latest[:, :-1].flip(1))
            _, state = layer.forward_chunk(tensors[f"L{length}.u"].double().mT, before)
            found = official_shift_state(layer, state.past)
            wanted = tensors[f"L{length}.forward_state_from_state0_f64"][..., :-1]
            torch.testing.assert_close(found, wanted, **EXACT)


def both_ways(u: Tensor, k: Tensor, d: Tensor, k_rev: Tensor | None) -> Tensor:
    """Convolve the past, and correlate the future, of signals (batch, channel, length)."""
    y = fft_conv(u.mT, k) + d * u.mT
    if k_rev is not None:
        y = y + fft_conv(u.flip(-1).mT, k_rev).flip(-2)
    return y.mT


def fftconv(about: dict[str, Any], t: dict[str, Tensor]) -> Tensor:
    """What the official ``fftconv_ref`` computes, by our convolution."""
    y = both_ways(t["u"], t["k"], t["D"], t.get("k_rev"))
    y = F.gelu(y) if about.get("gelu", True) else y
    return y * t["dropout_mask"][..., None] if "dropout_mask" in t else y


def fftconv_h3(about: dict[str, Any], t: dict[str, Tensor]) -> Tensor:
    """What the official ``fftconv_h3_ref`` computes: the core of H3."""
    q, k, v = (t[name].unflatten(1, (-1, about["head_dim"])) for name in ("q", "k", "v"))
    kv = torch.einsum("bhil,bhjl->bijhl", k, v)
    kv = both_ways(kv, t["ssm_kernel"], t["D"], t.get("ssm_kernel_rev"))
    return torch.einsum("bijhl,bhil->bhjl", kv, q).flatten(1, 2)


@covers("fftconv")
def test_the_convolution_is_the_official_one_with_its_gradients(case: Case) -> None:
    for name, about in case.about["cases"].items():
        official = fftconv_h3 if about["fn"] == "fftconv_h3_ref" else fftconv
        stored = named(case.tensors(), f"{name}.")
        gradients = {n: t for n, t in named(stored, "d", "_f64").items() if n in stored}
        inputs = {n: stored[n].double().requires_grad_() for n in gradients}
        if "dropout_mask" in stored:
            inputs["dropout_mask"] = stored["dropout_mask"].double()
        y = official(about, inputs)
        torch.testing.assert_close(y, stored["y_f64"], **EXACT)
        y.backward(stored["dout"].double())
        for n, wanted in gradients.items():
            torch.testing.assert_close(inputs[n].grad, wanted, **EXACT)


def lm_config(about: dict[str, Any]) -> ModelConfig:
    """Our configuration of a described model."""
    attention = {"n_heads": about.get("num_heads", 1), "bias": True}
    if about.get("rotary"):
        d_head = about["d_model"] // about["num_heads"]
        attention |= {"position": f"rope(fraction={about['rotary'] / d_head})"}
    placed = about["attn_layer_idx"] or []
    names = ("attention" if i in placed else "h3" for i in range(about["n_layer"]))
    return ModelConfig(
        " ".join(names),
        vocab_size=-(-about["vocab_size"] // about["pad"]) * about["pad"],
        d_model=about["d_model"],
        max_len=about.get("max_pos") or None,
        layers={
            "h3": {"d_state": about["d_state"], "d_head": about.get("head_dim", 1)},
            "attention": attention,
            "feed_forward": {"d_hidden": about["d_inner"]},
        },
    )


def language_model(case: Case, order: HeadOrder = "pytorch", legacy: bool = False) -> LanguageModel:
    weights = named(case.tensors(), "state_dict.")
    if legacy:
        older = {new: old for old, new in case.about["legacy_key_map"].items()}
        weights = {older[name]: tensor for name, tensor in weights.items()}
    settings = {"num_heads": case.about["config"].get("num_heads", 1), "head_order": order}
    model = load_pretrained(weights, settings=settings, device=here())
    check_expressible(lm_config(case.about["config"]), model.config)
    return model


@covers("h3_lm")
@torch.no_grad()
def test_a_language_model_gives_the_official_logits(case: Case) -> None:
    tensors, model = case.tensors(), language_model(case)
    embedded = model.embedding(tensors["input_ids"])
    if model.positions is not None:
        embedded = embedded + model.positions.weight[: embedded.shape[1]]
    assert_near(model.norm(model.stack(embedded)), tensors["final_hidden"])
    assert (model(tensors["input_ids"]) - tensors["logits"]).abs().max() < 1e-4
    exact = model.double()(tensors["input_ids"])
    limit = 1e-6 if case.about["config"].get("rotary") else 1e-9  # its frequencies are of float32
    assert_near(exact, tensors["logits_f64"], limit)


@covers("h3_lm")
@torch.no_grad()
def test_a_language_model_gives_those_of_the_fused_path(case: Case) -> None:
    tensors, model = case.tensors(), language_model(case, "fused")
    wanted = tensors.get("logits_fastpath_ref", tensors["logits"])  # the same for heads of width 1
    assert (model(tensors["input_ids"]) - wanted).abs().max() < 1e-4


@covers("h3_lm")
@torch.no_grad()
def test_a_language_model_goes_on_step_by_step_after_a_prompt(case: Case) -> None:
    tensors, model = case.tensors(), language_model(case)
    ids, prompt = tensors["input_ids"], case.about["config"]["prefill"]
    logits, state = model.forward_chunk(ids[:, :prompt], model.init_state(len(ids)))
    logits = torch.cat([logits, walk(model, ids[:, prompt:], state)[0]], dim=1)
    wanted = tensors.get("logits_prefill_step", tensors["logits"])  # no such path for wider heads
    assert (logits - wanted).abs().max() < 1e-4


@covers("h3_lm", where=lambda case: "greedy_ids" in case.tensors())  # not with wider heads
def test_a_language_model_decodes_the_official_tokens(case: Case) -> None:
    tensors = case.tensors()
    wanted, prompt = tensors["greedy_ids"], case.about["config"]["prefill"]
    found = generate(language_model(case), wanted[:, :prompt], wanted.shape[1] - prompt)
    assert torch.equal(wanted[:, :prompt], tensors["input_ids"][:, :prompt])
    assert torch.equal(found, wanted[:, prompt:])


@covers("h3_lm", where=lambda case: "legacy_key_map" in case.about)
@torch.no_grad()
def test_older_names_load_the_same_model(case: Case) -> None:
    ids = case.tensors()["input_ids"]
    assert torch.equal(language_model(case, legacy=True)(ids), language_model(case)(ids))


def samples(case: Case, method: str) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Whole examples of one official toy language, with their settings."""
    for name, about in case.about["cases"].items():
        args = about["args"]
        if args["copy_method"] != method:
            continue
        test_length = args.get("test_seq_len") or args["input_seq_len"]
        for split, length in (("train", args["input_seq_len"]), ("test", test_length)):
            x, y = (case.tensors()[f"{name}.{split}_{part}"] for part in "xy")
            examples, scored = torch.cat([x, y[:, -1:]], dim=1), y != -100
            assert torch.equal(y[scored], examples[:, 1:][scored])
            assert scored.all() if split == "train" else not scored[:, :length].any()
            yield {**args, "length": length}, examples


def assert_recalls(
    examples: Tensor, task: AssociativeRecall, length: int, allow_dot: bool = False
) -> None:
    """The grammar of associative recall, and its one answer; "." for a key that is not there."""
    dots = dict.fromkeys(product(range(1, task.n_key_tokens + 1), repeat=task.key_length), 0)
    mark, keys, size = task.vocab_size - 1, task.n_key_tokens, task.key_length
    for example in examples.tolist():
        n_pairs = length // (size + 1)
        pairs, rest = example[: n_pairs * (size + 1)], example[n_pairs * (size + 1) :]
        table: dict[tuple[int, ...], int] = {}
        for start in range(0, len(pairs), size + 1):
            *key, value = pairs[start : start + size + 1]
            assert all(1 <= token <= keys for token in key)
            assert keys < value <= 2 * keys
            assert table.setdefault(tuple(key), value) == value
        known = {**dots, **table} if allow_dot else table
        assert rest == [mark, *rest[1:-1], known[tuple(rest[1:-1])]]


@covers("synthetics")
def test_official_recall_and_ours_have_one_grammar(case: Case) -> None:
    for args, examples in samples(case, "assoc_recall"):
        sizes: Any = {"vocab_size": args["vocab_size"], "key_length": args.get("num_keys", 1)}
        allow_dot = {"allow_dot": True} if args.get("allow_dot") else {}
        task = AssociativeRecall(length=args["input_seq_len"], **sizes, **allow_dot)
        assert_recalls(examples, task, args["length"], **allow_dot)
        problems = task.problems(args["length"], 0)
        ours = torch.cat([problems.prompts, problems.answers], dim=1)
        assert_recalls(ours, task, args["length"], **allow_dot)
        assert ours.shape[1] == examples.shape[1]


def assert_repeats(examples: Tensor, task: InductionHead, length: int) -> None:
    """The grammar of the induction head: marks, the same answer after each, and ordinary noise."""
    mark, size = task.vocab_size - 1, task.induction_length
    for example in examples.tolist():
        answer = example[length + 1 :]
        assert example[length] == mark
        assert len(answer) == size
        places = [at for at in range(length) if example[at] == mark]
        assert 1 <= len(places) <= task.n_triggers
        assert max(places) < length - 1 - size
        for at in places:
            assert example[at + 1 : at + 1 + size] == answer
        assert all(1 <= token < mark for token in example if token != mark)


@covers("synthetics")
def test_the_official_induction_head_speaks_our_language(case: Case) -> None:
    for args, examples in samples(case, "induction_head"):
        task = InductionHead(
            vocab_size=args["vocab_size"],
            length=args["input_seq_len"],
            induction_length=args.get("induction_len", 1),
            n_triggers=args.get("induction_num_triggers", args.get("num_triggers", 1)),
        )
        assert_repeats(examples, task, args["length"])
        problems = task.problems(args["length"], 0)
        ours = torch.cat([problems.prompts, problems.answers], dim=1)
        assert_repeats(ours, task, args["length"])
        assert ours.shape[1] == examples.shape[1]


@covers("synthetics")
def test_official_vocabularies_are_ours(case: Case) -> None:
    """Sorted as text: "." first, "=>" last."""
    for about in case.about["cases"].values():
        assert about["vocab"][0] == "."
        assert about["vocab"][-1] == "=>"
        assert len(about["vocab"]) == about["args"]["vocab_size"]
