"""RWKV-7: the tensors of flash-linear-attention give the function of the official formulas."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.errors import InputError
from stateline.models.convert.table import (
    CONVERTERS,
    load_pretrained,
    read_pretrained,
    write_pretrained,
)
from stateline.models.convert.weights import Weights
from tests.models.published import FOLDERS, assert_near, assert_same_tensors, tokens

pytestmark = pytest.mark.cpu  # what is tested are files

HEADS = 4


def official_logits(w: dict[str, Tensor], row: Tensor) -> Tensor:
    """Token by token, by the formulas of the paper, from tensors by their names in the file."""
    layers = 1 + max(int(name.split(".")[2]) for name in w if name.startswith("model.layers."))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape, w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def low(x: Tensor, name: str, inside: Any = lambda x: x) -> Tensor:
        found = w[f"{name}.lora.2.weight"] @ inside(w[f"{name}.lora.0.weight"] @ x)
        return found + w.get(f"{name}.lora.2.bias", 0.0)

    width = w["model.norm.weight"].numel()
    shifts = torch.zeros(2, layers, width, dtype=torch.float64)
    states = torch.zeros(layers, HEADS, width // HEADS, width // HEADS, dtype=torch.float64)
    logits = []
    for token in row:
        x = norm(w["model.embeddings.weight"][token], "model.layers.0.pre_norm")
        first = None
        for i in range(layers):
            at = f"model.layers.{i}."
            h, before = norm(x, f"{at}attn_norm"), shifts[0, i].clone()
            shifts[0, i] = h
            mixed = {n: h + w[f"{at}attn.x_{n}"].flatten() * (before - h) for n in "rwkvag"}
            r, k, v = (w[f"{at}attn.{n}_proj.weight"] @ mixed[n] for n in "rkv")
            # the official decay: exp(-exp(w)) with w = -softplus(-f) - 1/2
            f = low(mixed["w"], f"{at}attn.w_lora", torch.tanh)
            decay = torch.exp(-torch.exp(-F.softplus(-f) - 0.5))
            if first is None:
                first = v
            else:
                v = v + (first - v) * low(mixed["v"], f"{at}attn.v_lora").sigmoid()
            a = low(mixed["a"], f"{at}attn.a_lora").sigmoid()
            g = low(mixed["g"], f"{at}attn.g_lora", torch.sigmoid)
            kappa = F.normalize((k * w[f"{at}attn.k_k"]).view(HEADS, -1), dim=-1)
            k = k * (1 + (a - 1) * w[f"{at}attn.k_a"])
            r, k, v, a, decay = (t.view(HEADS, -1) for t in (r, k, v, a, decay))
            s = states[i]
            removed = (s @ kappa[..., None]) * (kappa * a)[:, None]
            states[i] = s * decay[:, None] - removed + v[..., None] * k[:, None]
            y = (states[i] @ r[..., None])[..., 0]
            weight, bias = w[f"{at}attn.g_norm.weight"], w[f"{at}attn.g_norm.bias"]
            y = F.group_norm(y.reshape(1, -1), HEADS, weight, bias, 1e-5 * (width // HEADS))[0]
            y = y + ((r * k * w[f"{at}attn.r_k"]).sum(-1, keepdim=True) * v).flatten()
            x = x + w[f"{at}attn.o_proj.weight"] @ (y * g)
            h, before = norm(x, f"{at}ffn_norm"), shifts[1, i].clone()
            shifts[1, i] = h
            k = w[f"{at}ffn.key.weight"] @ (h + w[f"{at}ffn.x_k"] * (before - h))
            x = x + w[f"{at}ffn.value.weight"] @ k.relu().square()
        logits.append(w["lm_head.weight"] @ norm(x, "model.norm"))
    return torch.stack(logits)


@torch.no_grad()
def written(folder: Path) -> dict[str, Tensor]:
    """A tiny model whose tensors all matter, in a folder."""
    FOLDERS["rwkv7"](folder / "first")
    model = load_pretrained(folder / "first").double()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.2)
    write_pretrained(model, folder / "hf", "rwkv7")
    return dict(Weights(folder / "hf"))


@torch.no_grad()
def test_rwkv7_is_the_official_function_cut_anywhere_and_goes_back(tmp_path: Path) -> None:
    weights = written(tmp_path)
    assert weights["model.layers.1.attn.v_lora.lora.0.weight"].shape == (2, 32)
    assert weights["model.layers.0.attn.x_r"].shape == (1, 1, 32)
    assert not any("layers.0.attn.v_lora" in name for name in weights)
    found = read_pretrained(tmp_path / "hf")
    x = tokens()
    wanted = torch.stack([official_logits(weights, row) for row in x])
    assert_near(found.model(x), wanted, 1e-10)
    state, pieces = found.model.init_state(2), []
    for piece in x.split([1, 7, 16], dim=1):
        y, state = found.model.forward_chunk(piece, state)
        pieces.append(y)
    assert_near(torch.cat(pieces, dim=1), wanted, 1e-10)
    narrow = load_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert_near(narrow(x).double(), wanted, 1e-5)
    write_pretrained(found.model, tmp_path / "back", "rwkv7")
    assert_same_tensors(tmp_path / "back", tmp_path / "hf")


@torch.no_grad()
def test_greedy_decoding_is_that_of_the_official_formulas(tmp_path: Path) -> None:
    weights = written(tmp_path)
    model, row = load_pretrained(tmp_path / "hf"), tokens(batch=1, length=4)
    logits, state = model.forward_chunk(row, model.init_state(1))
    for _ in range(48):
        row = torch.cat([row, logits[:, -1:].argmax(dim=-1)], dim=1)
        y, state = model.step(row[:, -1], state)
        logits = y[:, None]
    official = official_logits(weights, row[0])
    assert official[3:-1].argmax(dim=-1).equal(row[0, 4:])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"a_low_rank_dim": 5}, "a_low_rank_dim must be 3 here, got 5"),
        ({"value_dim": 64}, "value_dim must be 32 here, got 64"),
        ({"attn": {"layers": [1]}}, "attn=.* is not supported"),
        ({"norm_eps": 1e-6}, "norm_eps=1e-06 is not supported"),
    ],
)
def test_what_has_no_counterpart_is_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    FOLDERS["rwkv7"](tmp_path / "hf")
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    with pytest.raises(InputError, match=message):
        CONVERTERS["rwkv7"].config({**settings, **changed})
