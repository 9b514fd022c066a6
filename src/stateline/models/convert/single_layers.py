"""Layers alone, from their official weights and back."""

import re
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from stateline.errors import InputError, check_choice
from stateline.models.convert.decoder_parts import h3_parts
from stateline.models.convert.h3 import in_order_of_pytorch
from stateline.models.convert.parts import (
    SAME,
    TRANSPOSED,
    Change,
    Names,
    Part,
    Place,
    official_pieces,
    read_parts,
)
from stateline.models.convert.weights import some_names
from stateline.ops.dplr_ssm.pytorch import transition

Tensors = Mapping[str, Tensor]


def read_layer(kind: str, tensors: Tensors) -> dict[str, Tensor]:
    """Our tensors of a layer, from an official one.

    Args:
        kind: Name of the layer: a key of ``LAYERS``.
        tensors: State dict of the official layer, in any version of its code.

    Returns:
        By our names, for ``load_state_dict``, each in memory of its own.

    Raises:
        InputError: If the layer is not known, or tensors are missing, left over or do not fit.
    """
    return dict(read_parts(tensors, _parts(kind, tensors), _NAMES))


@torch.no_grad()
def write_layer(kind: str, tensors: Tensors, like: Tensors) -> dict[str, Tensor]:
    """The inverse of :func:`read_layer`.

    Args:
        kind: Name of the layer: a key of ``LAYERS``.
        tensors: Our tensors, by our names.
        like: State dict of an official layer of the same sizes: the names, shapes and precision
            that are wanted. Its values are not used.

    Returns:
        By the official names, for ``load_state_dict``. :func:`read_layer` reads the same from it.

    Raises:
        InputError: If the layer is not known, or the official layer cannot hold our tensors.
    """
    official = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    parts = [part for part in _parts(kind, official) if part.ours]
    try:
        for part in parts:
            for name, piece in official_pieces(part, tensors[part.ours]):
                place = official[name][part.within]
                place.copy_(piece.reshape(place.shape))
    except (LookupError, RuntimeError) as error:
        raise InputError(
            f"our {part.ours!r} is missing, or does not fit the official layer: {error}"
        ) from error
    again = read_layer(kind, official)
    lost = [n for n, t in tensors.items() if n not in again or not again[n].to(t).equal(t)]
    if lost:
        raise InputError(f"the official layer cannot hold our {some_names(lost)} exactly")
    return official


def _parts(kind: str, official: Tensors) -> list[Part]:
    check_choice("official layer", kind, LAYERS)
    try:
        return LAYERS[kind](official)
    except KeyError as error:
        raise InputError(f"the published weights lack {error}: are they of {kind}?") from error


_NAMES = Names("", head="")
_AT = Place()


def _shape(read: Callable[[Tensor], Tensor]) -> Change:
    """The same entries in another shape; writing finds the shape at the place of the tensor."""
    return Change(read, SAME.write)


_FLAT = _shape(torch.flatten)
_OUTPUTS = _shape(lambda t: t.flatten(0, 1))


def _stacked(n: int) -> Change:
    return _shape(lambda t: t.unflatten(0, (n, -1)))


_KEYS = "kv_proj.weight:_kvq.keys_layer.kernel+_kvq.values_layer.kernel"
_GATES = (
    "gates.weight:forget_gate.kernel+input_gate.kernel gates.bias:forget_gate.bias+input_gate.bias"
)
_OUT = "post_attn_mlp.output_layer.kernel"


def _block_recurrent(official: Tensors) -> list[Part]:
    vectors = any(name.startswith("recurrent_tbase.") for name in official)
    local = Place("tbase.", "layers.0.layer.local." if vectors else "layers.0.layer.")
    block = Place("tbase.", "layers.")
    parts = [
        *block.same(
            "0.norm.weight:_kvq.pre_attn_layernorm.scale 1.norm.weight:pre_ffn_layernorm.scale "
            "1.layer.in_proj.weight:ffn.hidden0.kernel "
            "1.layer.out_proj.weight:ffn.output_layer.kernel"
        ),
        *local.same(f"scale:_kvq.attention_scale q_proj.weight:_kvq.queries_layer.kernel {_KEYS}"),
        *Place("", local.here).same("bucket_bias:relative_positions.rel_embedding"),
        *(_state_vectors(official) if vectors else local.same(f"out_proj.weight:{_OUT}")),
    ]
    for ours, name in (("in_proj", "hidden0"), ("out_proj", "output_layer")):
        kernel = official[f"tbase.ffn.{name}.kernel"]
        zeros = partial(kernel.new_zeros, kernel.shape[-1])
        parts.append(block.part(f"1.layer.{ours}.bias", (), constant=zeros))
    # In Flax, the first axis of a kernel is the input.
    return [
        part._replace(changes=(TRANSPOSED,)) if "".join(part.official).endswith(".kernel") else part
        for part in parts
    ]


def _state_vectors(official: Tensors) -> list[Part]:
    layer, own = Place("tbase.", "layers.0.layer."), Place("recurrent_tbase.", "layers.0.layer.")
    half, single = len(official[f"tbase.{_OUT}"]) // 2, own.there + _OUT not in official
    parts = [
        layer.part("local.out_proj.weight", [_OUT], within=slice(half)),
        layer.part("cross.out_proj.weight", [_OUT], within=slice(half, None)),
        *layer.same("cross.q_proj.weight:_kvq.queries2_layer.kernel cross.scale:attention_scale2"),
        *Place("", layer.here).same("initial:recurrent_initial_state"),
        *own.same(
            "ids:_kvq.position_embeddings norm.weight:_kvq.pre_attn_layernorm.scale "
            f"qq_proj.weight:_kvq.queries_layer.kernel+_kvq.queries2_layer.kernel {_KEYS}"
        ),
        own.part("scales", ["_kvq.attention_scale", "attention_scale2"], joined=_stacked(2)),
    ]
    updates = {"ffn": "mix"} if single else {"post_attn_mlp": "mix"}
    if f"{own.there}pre_ffn_layernorm.scale" in official:
        parts += own.same("feed_norm.weight:pre_ffn_layernorm.scale")
        updates["ffn"] = "feed"
    for name, ours in updates.items():
        update = Place(f"{own.there}{name}.", f"{own.here}{ours}.")
        hidden = "hidden.weight:hidden0.kernel" if name == "ffn" else ""
        gates = "keep:gate_bias" if f"{update.there}gate_bias" in official else _GATES
        parts += update.same(f"propose.weight:output_layer.kernel {hidden} {gates}")
    return parts


def _gss(_: Tensors) -> list[Part]:
    pairs = Change(lambda t: torch.stack(t.chunk(2), dim=-1), lambda t: torch.cat(t.unbind(-1)))
    ssm = Place("dss.", "layer.")
    return [
        *_AT.same(
            "norm.* layer.gate.weight:to_u.0.weight layer.narrow.weight:to_v.0.weight "
            "layer.widen.weight:to_gate.weight layer.out_proj.*:to_out.*"
        ),
        *ssm.same("norm.* ssm.log_decay:Lambda_real ssm.frequency:Lambda_imag ssm.skip:param_D"),
        ssm.part("ssm.c", ["C_real", "C_imag"], joined=pairs),
    ]


def _implicit_filters(official: Tensors) -> list[Part]:
    numbers = {int(m[1]) for n in official if (m := re.match(r"implicit_filter\.(\d+)\.", n))}
    last = max(numbers, default=4)
    first, *hidden = maps = range(0, last, 2)
    net = Place("implicit_filter.")
    stacked, sines = _stacked(len(hidden)), Change(_equal, lambda t: t.repeat(len(maps), 1))
    return [
        *_AT.same("skip:bias"),
        *_AT.same("features:pos_emb.z", _shape(lambda t: t[0])),
        *_AT.same("times:pos_emb.t", _FLAT),
        *_AT.same("rates:modulation.deltas", Change(lambda t: t.flatten().abs(), torch.neg)),
        *net.same(f"w_in:{first}.weight b_in:{first}.bias w_out:{last}.weight"),
        net.part("w_hidden", [f"{n}.weight" for n in hidden], joined=stacked),
        net.part("b_hidden", [f"{n}.bias" for n in hidden], joined=stacked),
        net.part("frequency", [f"{n + 1}.freq" for n in maps], joined=sines),
    ]


def _equal(rows: Tensor) -> Tensor:
    if not rows.equal(rows[:1].expand_as(rows)):
        raise InputError("an official filter has one sine module: all its freq must be equal")
    return rows[0]


def _diagonal_ssm(official: Tensors, at: Place = _AT) -> list[Part]:
    parts = at.same("c:C", _OUTPUTS) + _skip(at)
    if f"{at.there}A_real" in official:
        return parts + _upper_half(at)
    if f"{at.there}inv_A_real" in official:
        return parts + at.same("log_dt log_decay:inv_A_real frequency:A_imag b:B")
    like = official[f"{at.there}w_imag"]
    ones = at.part("b", (), constant=lambda: like.new_tensor([1.0, 0.0]).repeat(*like.shape, 1))
    return [*parts, ones, *at.same("log_dt log_decay:log_w_real frequency:w_imag")]


def _skip(at: Place = _AT) -> list[Part]:
    return Place("", at.here).same("skip:D", _FLAT)


def _upper_half(at: Place) -> list[Part]:
    """The modes of S4's code, which stores modes of negative frequency without the sign."""
    return [
        *at.same("log_decay:A_real"),
        *at.same("log_dt:inv_dt", _FLAT),
        *at.same("frequency:A_imag", Change(torch.neg, torch.neg)),
        *at.same("b:B", _shape(partial(_only, "B"))),
    ]


def _only(name: str, vectors: Tensor) -> Tensor:
    """Remove the axis of the rank, which official tensors have first."""
    if len(vectors) != 1:
        raise InputError(
            f"{name} must have rank one, got {len(vectors)}: only kernels of the measure legs can "
            "be converted"
        )
    return vectors[0]


def _s4d(official: Tensors) -> list[Part]:
    inner = _diagonal_ssm(official, Place("kernel.kernel.", "ssm."))
    return inner + _AT.same("out_proj.*:output_linear.*")


def _s4(official: Tensors) -> list[Part]:
    plain = partial(_plain_readout, official, int(official["l_kernel"]))
    return [
        *_upper_half(_AT),
        *_AT.same("p:P", _shape(partial(_only, "P"))),
        *_AT.same("c:C", _shape(plain)),
        *_skip(),
        Part("", ("l_kernel",)),
    ]


def _plain_readout(official: Tensors, length: int, stored: Tensor) -> Tensor:
    """C from C (I - A^L), by solving a linear system per channel; L is 0 before the first use."""
    if not length:
        return stored.flatten(0, 1)
    dt, p = official["inv_dt"].double().exp().flatten(), official["P"][0]
    a = torch.stack([-official["A_real"].exp(), -official["A_imag"]], dim=-1)
    copies = len(dt) // len(a)
    step = transition(dt, *(t.double().repeat(copies, 1, 1) for t in (a, p)))
    one = torch.eye(step.shape[-1], dtype=step.dtype, device=step.device)
    mirror = step.new_tensor([1.0, -1.0])
    decayed = torch.linalg.matrix_power(step, length)
    seen = (stored.double() * mirror).flatten(2)
    plain = torch.linalg.solve(one - decayed, seen[..., None])[..., 0]
    return (plain.unflatten(-1, (-1, 2)) * mirror).flatten(0, 1).to(stored.dtype)


def _dss(official: Tensors) -> list[Part]:
    imag = "Lambda_log_im" if "Lambda_log_im" in official else "Lambda_im"
    modes = _AT.same(f"real:Lambda_log_neg_re frequency:{imag}")
    if "Lambda" in official:
        modes = [Part(n, ("Lambda",), within=(..., i)) for i, n in enumerate(("real", "frequency"))]
    steps = _shape(lambda t: t.view(len(t), -1))
    return [*modes, *_AT.same("log_dt", steps), *_AT.same("c:W", _OUTPUTS), *_skip()]


def _s5(official: Tensors) -> list[Part]:
    both = "C1" in official
    at = Place("", "core." if both else "")
    # Of two directions, the input skips the first only.
    first = Change(lambda t: torch.cat([t, torch.zeros_like(t)]), lambda t: t.chunk(2)[0])
    return [
        *at.same(f"real:Lambda_re frequency:Lambda_im b:B c:{'C1+C2' if both else 'C'}"),
        *at.same("log_dt:log_step", _FLAT),
        *at.same("skip:D", first if both else SAME),
    ]


def _h3(official: Tensors) -> list[Part]:
    heads, width = len(official["D"]), len(official["ssm_k_D"])
    return h3_parts(Place("", "", {"d_model": width, "d_head": width // heads}))


def _h3_pytorch(official: Tensors) -> list[Part]:
    return in_order_of_pytorch(_h3(official), len(official["D"]))


LAYERS: Mapping[str, Callable[[Tensors], list[Part]]] = {
    "block_recurrent": _block_recurrent,
    "gss": _gss,
    "implicit_filters": _implicit_filters,
    "diagonal_ssm": _diagonal_ssm,
    "s4d": _s4d,
    "s4": _s4,
    "dss": _dss,
    "s5": _s5,
    "h3_fused": _h3,
    "h3_pytorch": _h3_pytorch,
}
"""The tensors of each layer, from the names and shapes of an official one."""
