"""GPT-NeoX, and the official models of "Repeat After Me", which are built on it."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from stateline.models.convert import gpt_neox
from stateline.models.convert.table import load_pretrained, read_pretrained
from stateline.models.language_model import LanguageModel
from tests.parity.cases import Case, covers, here
from tests.parity.models import assert_decodes, assert_hidden_near, assert_near

POSITIONS = {"nope": "none", "alibi": "alibi", "hard_alibi": "hard_alibi", "rope": "rope"}


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def published(case: Case) -> LanguageModel:
    found = read_pretrained(case.path.parent, device=here())
    assert found.format in gpt_neox.CONVERTERS
    return found.model


@covers("gpt_neox")
def test_a_published_model_gives_the_official_logits(case: Case) -> None:
    wanted = case.tensors("vectors.safetensors")
    assert_near(published(case)(wanted["tokens"]), wanted["logits"])


@covers("gpt_neox")
def test_a_published_model_gives_them_in_pieces(case: Case) -> None:
    wanted = case.tensors("vectors.safetensors")
    model, logits = published(case), []
    state = model.init_state(len(wanted["tokens"]))
    for piece in wanted["tokens"].split(5, dim=1):
        y, state = model.forward_chunk(piece, state)
        logits.append(y)
    assert_near(torch.cat(logits, dim=1), wanted["logits"])


@covers("gpt_neox")
def test_a_published_model_has_the_official_hidden_states(case: Case) -> None:
    assert_hidden_near(published(case), case.tensors("vectors.safetensors"))


@covers("gpt_neox")
def test_a_published_model_decodes_the_official_tokens(case: Case) -> None:
    wanted = case.tensors("vectors.safetensors")
    assert_decodes(published(case), wanted["tokens"], wanted["greedy_ids"])


def weights(vectors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix("w."): t for n, t in vectors.items() if n.startswith("w.")}


def transformers(case: Case) -> Iterator[tuple[LanguageModel, dict[str, Tensor]]]:
    """Each of the official Transformers, with its vectors."""
    for name, about in case.about.items():
        if name in POSITIONS:
            vectors, scheme = case.tensors(f"{name}.safetensors"), POSITIONS[name]
            positions = {"position": scheme, "masked_heads": about["num_masked_heads"]}
            settings = {**about["config"], **positions}
            model = load_pretrained(weights(vectors), settings=settings, device=here())
            yield model, vectors


@covers("official_models")
def test_every_position_scheme_gives_the_official_logits(case: Case) -> None:
    for model, wanted in transformers(case):
        assert_near(model(wanted["tokens"]), wanted["logits"])


@covers("official_models")
def test_every_position_scheme_has_the_official_hidden_states(case: Case) -> None:
    for model, wanted in transformers(case):
        assert_hidden_near(model, wanted)


@covers("official_models")
def test_every_position_scheme_attends_as_the_official_one(case: Case) -> None:
    for model, wanted in transformers(case):
        seen: list[Tensor] = []
        for link in model.stack.links:
            link.branches[0].layer.out_proj.register_forward_pre_hook(
                lambda _map, inputs, seen=seen: seen.append(inputs[0])
            )
        model(wanted["tokens"])
        for number, (link, heads) in enumerate(zip(model.stack.links, seen, strict=True)):
            branch = link.branches[0]
            x = branch.norm(wanted[f"hidden_{number}"])
            v = branch.layer.qkv(x).unflatten(-1, (3, branch.layer.n_heads, -1))[:, :, 2]
            summed = torch.einsum("bhts,bshd->bthd", wanted[f"attn_{number}"], v)
            assert_near(heads, summed.flatten(2))


@covers("official_models")
def test_every_position_scheme_decodes_the_official_tokens(case: Case) -> None:
    for model, wanted in transformers(case):
        assert_decodes(model, wanted["tokens"], wanted["greedy_ids_nocache"])


@covers("official_models")
def test_a_padded_row_is_the_row_alone(case: Case) -> None:
    for model, wanted in transformers(case):
        for row, mask in enumerate(wanted["attn_mask"].bool()):
            alone = model(wanted["tokens"][row, mask][None])[0]
            assert_near(alone, wanted["logits_attn_mask"][row, mask])


@covers("official_models")
def test_entries_that_count_twice_are_needed_for_that(case: Case) -> None:
    """Else no other test would notice that they count once."""
    for model, wanted in transformers(case):
        for link in model.stack.links:
            layer = link.branches[0].layer
            queries = layer.qkv.weight.unflatten(0, (3, layer.n_heads, -1))[0]
            queries[:, layer.d_head // 4 :] /= 2
        error = (model(wanted["tokens"]) - wanted["logits"]).abs().max()
        assert error > 1e-4


@covers("official_models")
def test_the_lstm_gives_the_official_logits_and_states(case: Case) -> None:
    wanted = case.tensors("lstm.safetensors")
    model = load_pretrained(weights(wanted), device=here())
    tokens = wanted["tokens"]
    logits, state = model.forward_chunk(tokens, model.init_state(len(tokens)))
    assert_near(model(tokens), wanted["logits"])
    assert_near(logits, wanted["logits"])
    assert_near(state.layers[0].h, wanted["h"].transpose(0, 1))
    assert_near(state.layers[0].c, wanted["c"].transpose(0, 1))
