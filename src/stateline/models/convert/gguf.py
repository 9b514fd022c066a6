"""GGUF files of llama.cpp, as the ``config.json`` and the tensors of transformers.

The header is read here; names of tensors and dequantised values are those of the package ``gguf``.

References:
    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; what llama.cpp changes in weights:
    ``convert_hf_to_gguf.py`` there.
"""

import math
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stateline.errors import InputError, needed
from stateline.files import regular_file
from stateline.ops.positions import RopeScaling, frequencies

SUFFIX = ".gguf"

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBERS |= {12: "d"}
"""Formats of the types of numbers."""
_STRING, _ARRAY = 8, 9
_KEPT = 1024
"""Longest array that is kept; longer ones are of the tokenizer."""


class _Stored(NamedTuple):
    """Where a tensor is in the file, and as what."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class _Header:
    """The metadata and the places of the tensors."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 4
        version = self._number("I")
        if bytes(data[:4]) != b"GGUF" or version not in (2, 3):
            raise ValueError("it is no GGUF file of version 2 or 3")
        n_tensors, n_fields = self._number("Q"), self._number("Q")
        self.fields: dict[str, Any] = {}
        for _ in range(n_fields):
            name = self._string()
            self.fields[name] = self._value(self._number("I"))
        self.tensors: dict[str, _Stored] = {}
        for _ in range(n_tensors):
            name, axes = self._string(), self._number("I")
            if axes > 4:
                raise ValueError(f"{name[:80]!r} has {axes} axes")
            shape = tuple(self._number("Q") for _ in range(axes))[::-1]
            self.tensors[name] = _Stored(shape, self._number("I"), self._number("Q"))
        step = self.fields.get("general.alignment", 32)
        if not (isinstance(step, int) and 0 < step < 1 << 20):
            raise ValueError(f"tensors are aligned to {step!r:.40} bytes")
        self.begin = -(-self._at // step) * step

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._data, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return value

    def _string(self) -> str:
        return bytes(self._bytes(self._number("Q"))).decode("utf-8", "replace")

    def _bytes(self, size: int) -> memoryview:
        if size > len(self._data) - self._at:
            raise ValueError("it ends too early")
        self._at += size
        return self._data[self._at - size : self._at]

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        if kind not in _NUMBERS:
            raise ValueError(f"it has a field of type {kind}")
        value = self._number(_NUMBERS[kind])
        return float(str(np.float32(value))) if kind == 6 else value

    def _array(self, kind: int, n: int) -> Any:
        """Its entries; ``None`` for a long one."""
        if kind in _NUMBERS and n > _KEPT:
            self._bytes(n * struct.calcsize(f"<{_NUMBERS[kind]}"))
        elif kind == _STRING and n > _KEPT:
            for _ in range(n):
                self._bytes(self._number("Q"))
        elif kind == _ARRAY:
            raise ValueError("it has an array of arrays")
        else:
            return [self._value(kind) for _ in range(n)]
        return None


def _turned(heads: str) -> Callable[[Tensor, Mapping[str, Any]], Tensor]:
    """llama.cpp rotates neighbouring entries in some families, so rows of heads lie otherwise."""

    def change(rows: Tensor, settings: Mapping[str, Any]) -> Tensor:
        pairs = rows.unflatten(0, (settings[heads], -1, 2))
        return pairs.transpose(1, 2).flatten(0, 2)

    return change


def _less_one(weight: Tensor, _: object) -> Tensor:
    """Norms whose weights transformers stores as offsets from one."""
    return weight - 1


def _transposed(weight: Tensor, _: object) -> Tensor:
    return weight.mT


_Change = Callable[[Tensor, Mapping[str, Any]], Tensor]
_TURNED: Mapping[str, _Change] = {
    "attn_q.": _turned("num_attention_heads"),
    "attn_k.": _turned("num_key_value_heads"),
}
_OFFSET: Mapping[str, _Change] = {"norm.weight": _less_one}


class _Family(NamedTuple):
    """How files of an architecture say what ``config.json`` says.

    Attributes:
        fields: Of each field, behind the name of the architecture, the name in ``config.json``.
        changes: Of tensors whose names contain a text: how they are changed back.
        settings: More settings, from those so far.
    """

    fields: Mapping[str, str]
    changes: Mapping[str, _Change] = {}
    settings: Callable[[dict[str, Any]], Mapping[str, Any]] = lambda _: {}


_DECODER = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_SLIDING = {**_DECODER, "attention.sliding_window": "sliding_window"}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def _query_scale(layers: int) -> Callable[[dict[str, Any]], Mapping[str, Any]]:
    """Only the largest models, of so many layers, scale queries by another width than a head's."""

    def settings(found: dict[str, Any]) -> Mapping[str, Any]:
        width = found["head_dim"]
        if found["num_hidden_layers"] == layers:
            width = found["hidden_size"] // found["num_attention_heads"]
        return {"query_pre_attn_scalar": width}

    return settings


_FAMILIES = {
    "llama": ("llama", _Family(_DECODER, _TURNED)),
    "granite": (
        "granite",
        _Family(
            {
                **_DECODER,
                "attention.scale": "attention_multiplier",
                "embedding_scale": "embedding_multiplier",
                "residual_scale": "residual_multiplier",
                "logit_scale": "logits_scaling",
            },
            _TURNED,
        ),
    ),
    "qwen2": ("qwen2", _Family(_DECODER)),
    "qwen3": ("qwen3", _Family(_DECODER)),
    "gemma": ("gemma", _Family(_DECODER, _OFFSET)),
    "gemma2": ("gemma2", _Family({**_SLIDING, **_CAPS}, _OFFSET, _query_scale(46))),
    "gemma3": (
        "gemma3_text",
        _Family(
            {**_SLIDING, "rope.freq_base_swa": "rope_local_base_freq"}, _OFFSET, _query_scale(62)
        ),
    ),
    "gpt2": (
        "gpt2",
        _Family(
            {
                "block_count": "n_layer",
                "context_length": "n_positions",
                "embedding_length": "n_embd",
                "feed_forward_length": "n_inner",
                "attention.head_count": "n_head",
                "attention.layer_norm_epsilon": "layer_norm_epsilon",
            },
            dict.fromkeys(
                ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"),
                _transposed,
            ),
        ),
    ),
    "mamba": (
        "mamba",
        _Family(
            {
                "block_count": "num_hidden_layers",
                "embedding_length": "hidden_size",
                "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
                "ssm.conv_kernel": "conv_kernel",
                "ssm.inner_size": "intermediate_size",
                "ssm.state_size": "state_size",
                "ssm.time_step_rank": "time_step_rank",
            },
            {
                "ssm_a": lambda rates, _: (-rates).log(),
                "ssm_conv1d.weight": lambda kernel, _: kernel[:, None],
            },
        ),
    ),
}
"""Of each architecture of llama.cpp: the ``model_type`` of transformers, and the rest."""

_TOKENS = {
    "bos_token_id": ("bos",),
    "eos_token_id": ("eos", "eot", "eom"),
    "pad_token_id": ("padding",),
}
"""Fields of special tokens, and their names in a GGUF file."""

FREQUENCIES = "rope_freqs.weight"
"""Divisors of the frequencies of rotary positions: Llama 3."""


class GGUF(Mapping[str, Tensor]):
    """A model in a GGUF file: its tensors by the names of transformers, dequantised when read.

    Call :meth:`name` first.

    Attributes:
        settings: As in a ``config.json``.
        tokenizer: The kind of the tokenizer; empty if there is none.

    Args:
        path: The file.

    Raises:
        InputError: If it is damaged, of an unknown architecture, or has a field or tensor that is
            not known; or the package ``gguf`` is missing.
    """

    def __init__(self, path: Path) -> None:
        regular_file(path, "model")
        self.path = path
        self._gguf = needed("gguf", f"the GGUF file {path}", "gguf")
        if not path.stat().st_size:
            raise self._damaged("it is empty")
        self._file = np.memmap(path, np.uint8, "r")
        try:
            header = _Header(self._file.data)
        except (struct.error, ValueError, OverflowError, MemoryError) as error:
            raise self._damaged(str(error)) from error
        self._begin, self._stored, self._names = header.begin, header.tensors, dict[str, str]()
        self.tokenizer = str(header.fields.get("tokenizer.ggml.model") or "")
        architecture = str(header.fields.get("general.architecture"))
        if architecture not in _FAMILIES:
            raise InputError(
                f"{path} holds a model of the architecture {architecture!r:.40}: known in GGUF "
                f"files are {', '.join(_FAMILIES)}"
            )
        self._architecture = architecture
        kind, self._family = _FAMILIES[architecture]
        self.settings: dict[str, Any] = {"model_type": kind, **self._read(header.fields)}

    def _read(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The settings; InputError for a field that is not known."""
        found: dict[str, Any] = {}
        begin, own = f"{self._architecture}.", self._family
        given = {n.removeprefix(begin): v for n, v in fields.items() if n.startswith(begin)}
        for name, ours in own.fields.items():
            if name in given:
                found[ours] = given.pop(name)
        if "token_embd.weight" not in self._stored:
            raise self._damaged("it has no token_embd.weight")
        found["vocab_size"] = self._stored["token_embd.weight"].shape[0]
        found["tie_word_embeddings"] = "output.weight" not in self._stored
        inert = {"vocab_size": found["vocab_size"], "rope.scaling.finetuned": None}
        if "num_attention_heads" in own.fields.values():
            heads = found.get("num_attention_heads")
            if not isinstance(heads, int) or not isinstance(found.get("hidden_size"), int):
                raise self._damaged("it has no number of heads, or no width")
            found.setdefault("num_key_value_heads", heads)
            width = found.setdefault("head_dim", found["hidden_size"] // max(1, heads))
            inert |= {"rope.dimension_count": width, "attention.value_length": width}
            found |= self._biases() | self._positions(given, width, found)
        else:
            inert |= {"context_length": None, "feed_forward_length": None, "ssm.dt_b_c_rms": False}
            inert |= {"attention.head_count": 0 if "state_size" in found else None}
        for name, value in given.items():
            if name not in inert or (inert[name] not in (None, value)):
                raise InputError(
                    f"{self.path} has {begin}{name}={value!r:.80}, which is not supported for this "
                    "architecture"
                )
        found |= own.settings(found)
        for name, kinds in _TOKENS.items():
            places = (fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in kinds)
            tokens = [*dict.fromkeys(n for n in places if n is not None)]
            if tokens:
                found[name] = tokens if len(tokens) > 1 else tokens[0]
        return found

    def _biases(self) -> dict[str, bool]:
        """Biases are known by their tensors; families without such a field have none, or all."""
        if self._architecture not in ("llama", "granite"):
            return {}
        return {
            "attention_bias": "blk.0.attn_q.bias" in self._stored,
            "mlp_bias": "blk.0.ffn_up.bias" in self._stored,
        }

    def _positions(
        self, given: dict[str, Any], width: int, found: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Scaled rotary positions."""
        names = {"type": "rope_type", "factor": "factor"}
        names["original_context_length"] = "original_max_position_embeddings"
        scaling = {
            ours: given.pop(f"rope.scaling.{name}")
            for name, ours in names.items()
            if f"rope.scaling.{name}" in given
        }
        if FREQUENCIES in self._stored:
            return {"rope_scaling": self._llama3(width, found)}
        return {} if scaling.get("rope_type", "none") == "none" else {"rope_scaling": scaling}

    def _llama3(self, width: int, found: Mapping[str, Any]) -> dict[str, Any]:
        """Llama 3's scaling, if the file's divisors are those of the releases."""
        divisors = self._dequantised(FREQUENCIES).double()
        factor, low, high, length = float(divisors.max()), 1.0, 4.0, 8192
        base = float(found.get("rope_theta", 10_000.0))
        scaling = RopeScaling("llama3", factor, low, high, length)
        like = torch.zeros((), dtype=torch.float64)
        wanted = frequencies(like, dims=width, base=base)
        wanted = wanted / frequencies(like, dims=width, base=base, scaling=scaling)
        if wanted.shape != divisors.shape or not torch.allclose(wanted, divisors, rtol=1e-4):
            raise InputError(
                f"{self.path} has {FREQUENCIES} that are not Llama 3's for factor {factor:g}: such "
                "rotary positions are not supported"
            )
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": length,
        }

    def name(self, official: Collection[str]) -> None:
        """Name the tensors as transformers does; those that have no such name keep their own."""
        gguf = self._gguf
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        layers = max(self.settings.get(name, 0) for name in ("num_hidden_layers", "n_layer"))
        table = gguf.get_tensor_name_map(kinds[self._architecture], layers)
        places = {name: table.get_name(name, (".weight", ".bias")) for name in official}
        self._names = {name: place for name, place in places.items() if place in self._stored}
        rest = self._stored.keys() - self._names.values() - {FREQUENCIES}
        self._names |= {name: name for name in rest}

    def __getitem__(self, name: str) -> Tensor:
        place = self._names[name]
        tensor = self._dequantised(place)
        for part, change in self._family.changes.items():
            if part in place:
                try:
                    tensor = change(tensor, self.settings)
                except RuntimeError as error:
                    raise self._damaged(f"{place} does not fit its fields") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _dequantised(self, place: str) -> Tensor:
        gguf, (shape, number, offset) = self._gguf, self._stored[place]
        try:
            kind = gguf.GGMLQuantizationType(number)
            block, size = gguf.GGML_QUANT_SIZES[kind]
            row = shape[-1] // block * size if shape else size
            begin, whole = self._begin + offset, math.prod(shape[:-1]) * row
            if (shape and shape[-1] % block) or begin + whole > len(self._file):
                raise ValueError(f"{place[:80]} of shape {shape} ends too early")
            data = np.asarray(self._file[begin : begin + whole]).reshape(*shape[:-1], row)
            values = gguf.dequantize(data, kind)
            return torch.from_numpy(np.array(values, np.float32)).view(shape)
        except (ValueError, KeyError, RuntimeError, OverflowError, NotImplementedError) as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, reason: str) -> InputError:
        return InputError(f"cannot read the model in {self.path}: {reason[:200]}; get it again")
