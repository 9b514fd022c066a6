"""Layers of Block-Recurrent Transformers, from their official weights."""

from collections.abc import Mapping

import torch
from torch import Tensor

from stateline.models.convert.weights import rename

_TOKENS = {
    "tbase._kvq.pre_attn_layernorm.scale": "layers.0.norm.weight",
    "tbase._kvq.queries_layer.kernel": "local.q_proj.weight",
    "tbase._kvq.keys_layer.kernel": "local.k",
    "tbase._kvq.values_layer.kernel": "local.v",
    "tbase._kvq.attention_scale": "local.scale",
    "tbase.post_attn_mlp.output_layer.kernel": "out",
    "relative_positions.rel_embedding": "local.bucket_bias",
    "tbase.pre_ffn_layernorm.scale": "layers.1.norm.weight",
    "tbase.ffn.hidden0.kernel": "layers.1.layer.in_proj.weight",
    "tbase.ffn.output_layer.kernel": "layers.1.layer.out_proj.weight",
}
_VECTORS = {
    "tbase._kvq.queries2_layer.kernel": "cross.q_proj.weight",
    "tbase.attention_scale2": "cross.scale",
    "recurrent_initial_state": "initial",
    "recurrent_tbase._kvq.position_embeddings": "ids",
    "recurrent_tbase._kvq.pre_attn_layernorm.scale": "norm.weight",
    "recurrent_tbase._kvq.queries_layer.kernel": "q",
    "recurrent_tbase._kvq.queries2_layer.kernel": "q2",
    "recurrent_tbase._kvq.keys_layer.kernel": "k",
    "recurrent_tbase._kvq.values_layer.kernel": "v",
    "recurrent_tbase._kvq.attention_scale": "scale",
    "recurrent_tbase.attention_scale2": "scale2",
    "recurrent_tbase.pre_ffn_layernorm.scale": "feed_norm.weight",
}
_UPDATE = {
    "hidden0.kernel": "hidden.weight",
    "output_layer.kernel": "propose.weight",
    "gate_bias": "keep",
    "forget_gate.kernel": "forget.weight",
    "forget_gate.bias": "forget.bias",
    "input_gate.kernel": "enter.weight",
    "input_gate.bias": "enter.bias",
}


def block_recurrent_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors of a block, from an official layer with its feed-forward.

    Args:
        tensors: Parameters of a ``TransformerLayer`` of google-research/meliad, by their paths
            joined with dots. Without ``recurrent_tbase``, the layer is a sliding window.

    Returns:
        By our names, for ``Stack`` of two ``Residual`` with root-mean-square norms: of
        ``BlockRecurrent`` (or ``SlidingAttention``), and of ``FeedForward``, whose biases are zero.

    Raises:
        InputError: If tensors are missing or left over.
    """
    recurrent = any(name.startswith("recurrent_tbase.") for name in tensors)
    single = "recurrent_tbase.post_attn_mlp.output_layer.kernel" not in tensors
    names = dict(_TOKENS)
    if recurrent:
        updates = {"ffn": "mix"} if single else {"post_attn_mlp": "mix", "ffn": "feed"}
        names |= _VECTORS | {
            f"recurrent_tbase.{theirs}.{part}": f"{ours}.{name}"
            for theirs, ours in updates.items()
            for part, name in _UPDATE.items()
        }
    found = rename(tensors, {name: names[name] for name in names if name in tensors})
    # In Flax, the first axis of a kernel is the input.
    found = {
        ours: found[ours].mT.contiguous() if name.endswith(".kernel") else found[ours]
        for name, ours in names.items()
        if ours in found
    }
    found["local.kv_proj.weight"] = torch.cat([found.pop("local.k"), found.pop("local.v")])
    ours = _with_vectors(found) if recurrent else _alone(found)
    for part in ("in_proj", "out_proj"):
        weight = ours[f"layers.1.layer.{part}.weight"]
        ours[f"layers.1.layer.{part}.bias"] = weight.new_zeros(len(weight))
    return ours


def _alone(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of a layer without state vectors."""
    found["local.out_proj.weight"] = found.pop("out")
    return {
        f"layers.0.layer.{name.removeprefix('local.')}" if name.startswith("local.") else name: t
        for name, t in found.items()
    }


def _with_vectors(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of a layer with state vectors; maps are joined or split as in our layer."""
    out = found.pop("out")
    found["local.out_proj.weight"], found["cross.out_proj.weight"] = (
        t.contiguous() for t in out.chunk(2, dim=1)
    )
    found["qq_proj.weight"] = torch.cat([found.pop("q"), found.pop("q2")])
    found["kv_proj.weight"] = torch.cat([found.pop("k"), found.pop("v")])
    found["scales"] = torch.stack([found.pop("scale"), found.pop("scale2")])
    for update in ("mix", "feed"):
        for part in ("weight", "bias"):
            gates = [found.pop(f"{update}.{gate}.{part}", None) for gate in ("forget", "enter")]
            if gates[0] is not None and gates[1] is not None:
                found[f"{update}.gates.{part}"] = torch.cat([gates[0], gates[1]])
    return {n if n.startswith("layers.") else f"layers.0.layer.{n}": t for n, t in found.items()}
