"""``generate`` of transformers writes what our own decoding writes, in every mode."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from stateline.errors import InputError
from stateline.generate import generate
from stateline.layers import select_rows
from stateline.models.language_model import LanguageModel
from tests.hf.conftest import MIXED, Make, hf

pytestmark = pytest.mark.filterwarnings("default")

PATTERNS = [
    MIXED,
    "attention(position=alibi)*2",
    "mamba2*2",
    "rg_lru attention(gated=true, qk_norm=offset)",
]


@pytest.fixture(params=PATTERNS)
def model(request: pytest.FixtureRequest, make: Make) -> LanguageModel:
    return make(request.param)


@pytest.fixture
def prompt() -> Tensor:
    return torch.randint(1, 61, (3, 9), generator=torch.Generator().manual_seed(0))


def padded(rows: list[Tensor], side: str = "left") -> dict[str, Tensor]:
    longest = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.int64)
    for number, row in enumerate(rows):
        start = longest - len(row) if side == "left" else 0
        ids[number, start : start + len(row)] = row
        mask[number, start : start + len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def ragged(prompt: Tensor) -> list[Tensor]:
    return [prompt[0], prompt[1, :4], prompt[2, :1], prompt[0, :4]]


def greedy(wrapped: object, new: int = 12, **settings: object) -> Tensor:
    length = settings["input_ids"].shape[1]
    return wrapped.generate(max_new_tokens=new, do_sample=False, **settings)[:, length:]


def test_greedy_texts_are_ours(model: LanguageModel, prompt: Tensor) -> None:
    found = greedy(hf.wrap(model), input_ids=prompt)
    assert torch.equal(found, generate(model, prompt, 12))
    assert len(found.unique()) > 3


def test_a_long_text_outgrows_the_room_of_the_state(make: Make, prompt: Tensor) -> None:
    model = make("attention(position=rope) h3")
    assert torch.equal(greedy(hf.wrap(model), 300, input_ids=prompt), generate(model, prompt, 300))


def test_the_room_is_for_the_longest_row(
    make: Make, prompt: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateline.hf.cache.ROOM", 2)
    rows, model = ragged(prompt), make("attention(position=rope) h3")
    found = greedy(hf.wrap(model, pad_token_id=0), 6, **padded(rows))
    assert torch.equal(found, torch.cat([generate(model, row[None], 6) for row in rows]))


def test_beams_are_those_without_a_cache(model: LanguageModel, prompt: Tensor) -> None:
    settings = {"num_beams": 4, "num_return_sequences": 2, "return_dict_in_generate": True}
    found, wanted = (
        hf.wrap(model).generate(
            prompt,
            max_new_tokens=8,
            do_sample=False,
            output_scores=True,
            use_cache=use_cache,
            **settings,
        )
        for use_cache in (True, False)
    )
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(found.sequences_scores, wanted.sequences_scores)


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk_size": 4}, {"use_cache": False}])
def test_left_padded_rows_go_on_as_each_alone(
    model: LanguageModel, prompt: Tensor, settings: dict[str, object]
) -> None:
    rows = ragged(prompt)
    wrapped = hf.wrap(model, pad_token_id=0)
    found = greedy(wrapped, **padded(rows), **settings)
    assert torch.equal(found, torch.cat([generate(model, row[None], 12) for row in rows]))


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk_size": 4}, {"use_cache": False}])
@pytest.mark.parametrize("masked", [True, False])
def test_prompts_that_end_with_padding_are_refused(
    make: Make, prompt: Tensor, settings: dict[str, object], masked: bool
) -> None:
    batch = padded(ragged(prompt), "right")
    if not masked:
        del batch["attention_mask"]
    with pytest.raises(InputError, match="pad prompts on the left"):
        greedy(hf.wrap(make("h3"), pad_token_id=0), **batch, **settings)


@torch.no_grad()
def plain_beams(model: LanguageModel, row: Tensor, beams: int, new: int) -> Tensor:
    """The best continuation of a row by beam search over our steps, without transformers."""
    logits, state = model.forward_chunk(row[None], model.init_state(1))
    scores, texts = logits[:, -1].log_softmax(dim=-1), torch.empty(1, 0, dtype=torch.int64)
    for _ in range(new):
        best, place = scores.flatten().topk(beams)
        source, token = place // scores.shape[1], place % scores.shape[1]
        texts = torch.cat([texts[source], token[:, None]], dim=1)
        logits, state = model.step(token, select_rows(state, source))
        scores = best[:, None] + logits.log_softmax(dim=-1)
    return texts[:1]


def test_left_padded_beams_are_those_of_a_plain_search_with_our_steps(
    model: LanguageModel, prompt: Tensor
) -> None:
    rows = ragged(prompt)
    found = greedy(hf.wrap(model, pad_token_id=0), 8, **padded(rows), num_beams=3)
    assert torch.equal(found, torch.cat([plain_beams(model, row, 3, 8) for row in rows]))
    assert not torch.equal(found, torch.cat([generate(model, row[None], 8) for row in rows]))


def test_left_padded_beams_are_those_of_each_row_alone(
    model: LanguageModel, prompt: Tensor
) -> None:
    rows, wrapped = ragged(prompt), hf.wrap(model, pad_token_id=0)
    found = greedy(wrapped, **padded(rows), num_beams=3)
    alone = [greedy(wrapped, input_ids=row[None], num_beams=3) for row in rows]
    assert torch.equal(found, torch.cat(alone))


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_padding_changes_no_logits(
    model: LanguageModel, prompt: Tensor, side: str, use_cache: bool
) -> None:
    rows = ragged(prompt)
    batch = padded(rows, side)
    logits = hf.wrap(model)(**batch, use_cache=use_cache).logits
    for found, mask, row in zip(logits, batch["attention_mask"].bool(), rows, strict=True):
        torch.testing.assert_close(found[mask], model(row[None])[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 2])])
@pytest.mark.parametrize("use_cache", [True, False])
def test_kept_logits_are_those_of_all(
    make: Make, prompt: Tensor, side: str, keep: int | Tensor, use_cache: bool
) -> None:
    wrapped, batch = hf.wrap(make()), padded(ragged(prompt), side)
    wanted = wrapped(**batch, use_cache=use_cache).logits
    wanted = wanted[:, -keep:] if isinstance(keep, int) else wanted[:, keep]
    found = wrapped(**batch, use_cache=use_cache, logits_to_keep=keep).logits
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("assistant", ["h3", "itself", "lookup"])
def test_assisted_decoding_writes_the_same(
    model: LanguageModel, make: Make, prompt: Tensor, assistant: str
) -> None:
    wrapped = hf.wrap(model, pad_token_id=0)
    helper = wrapped if assistant == "itself" else hf.wrap(make("h3"), pad_token_id=0)
    settings = {"assistant_model": hf.wrap(model, pad_token_id=0) if helper is wrapped else helper}
    if assistant == "lookup":
        settings = {"prompt_lookup_num_tokens": 3}
    for row in prompt:
        found = greedy(wrapped, 20, input_ids=row[None], **settings)
        assert torch.equal(found, generate(model, row[None], 20))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("copy_goes_first", [True, False])
def test_a_returned_cache_continues_and_a_copy_is_independent(
    model: LanguageModel,
    prompt: Tensor,
    copied: Callable[[hf.StatelineCache], hf.StatelineCache],
    copy_goes_first: bool,
) -> None:
    wrapped = hf.wrap(model)
    first = wrapped.generate(
        prompt, max_new_tokens=5, do_sample=False, return_dict_in_generate=True
    )
    cache = first.past_key_values
    both = copied(cache), cache
    for used in both if copy_goes_first else both[::-1]:
        assert used.get_seq_length() == 13
        found = greedy(wrapped, 7, input_ids=first.sequences, past_key_values=used)
        assert torch.equal(found, generate(model, prompt, 12)[:, 5:])


def test_sampling_is_repeatable(make: Make, prompt: Tensor) -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        settings = {"do_sample": True, "top_k": 5, "num_return_sequences": 2}
        drawn.append(hf.wrap(make()).generate(prompt, max_new_tokens=6, **settings))
    assert drawn[0].shape == (6, 15)
    assert torch.equal(*drawn)


def test_rows_that_have_ended_are_fed_padding_outside_of_the_vocabulary(
    make: Make, prompt: Tensor
) -> None:
    model = make()
    wanted = generate(model, prompt, 12)
    end = int(wanted[0, 2])
    wrapped = hf.wrap(model, eos_token_id=end)
    wrapped.generation_config.pad_token_id = 61
    found = greedy(wrapped, input_ids=prompt)
    for row, whole in zip(found, wanted, strict=True):
        ends = (whole == end).nonzero().flatten().tolist()
        length = ends[0] + 1 if ends else 12
        assert torch.equal(row[:length], whole[:length])
        assert (row[length:] == 61).all()


def test_padding_outside_of_the_vocabulary_may_be_named_by_the_configuration_alone(
    make: Make, prompt: Tensor
) -> None:
    wrapped = hf.wrap(make("h3"), pad_token_id=61)
    wrapped.generation_config.pad_token_id = None
    ended = torch.cat([prompt[:, :-1], torch.full((3, 1), 61)], dim=1)
    torch.testing.assert_close(wrapped(ended).logits[:, :-1], wrapped(prompt).logits[:, :-1])


def test_a_cache_is_returned_only_where_it_is_of_use(make: Make, prompt: Tensor) -> None:
    wrapped = hf.wrap(make("h3"))
    assert wrapped(prompt).past_key_values is not None
    assert wrapped.train()(prompt).past_key_values is None
    wrapped.eval().config.use_cache = False
    assert wrapped(prompt).past_key_values is None


def test_the_loss_counts_all_positions_whatever_logits_are_kept(make: Make, prompt: Tensor) -> None:
    wrapped = hf.wrap(make("h3"))
    assert torch.equal(
        wrapped(prompt, labels=prompt, logits_to_keep=1).loss, wrapped(prompt, labels=prompt).loss
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 2, 32)}, "give either input_ids or inputs_embeds"),
        ({"position_ids": torch.tensor([[0, 3]])}, "must count from 0 in each text"),
        ({"shift_labels": torch.zeros(1, 2)}, "labels are shifted here: give labels"),
        ({"position_ids": torch.tensor([[5, 6]])}, "must count from 0 in each text"),
        ({"seq_idx": torch.zeros(1, 3)}, r"seq_idx must have the shape of input_ids, \(1, 2\)"),
        ({"cu_seq_lens_q": torch.tensor([0, 1])}, r"end with its length, got \[0, 1\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 9, 2])}, r"must rise from 0 .*, got \[0, 9, 2\]"),
        (
            {"position_ids": torch.arange(2)[None], "attention_mask": torch.tensor([[0, 1]])},
            "packed rows have no padding",
        ),
        ({"output_hidden_states": True}, "hidden states are not returned"),
        ({"attention_mask": torch.ones(1, 1, 2, 2)}, r"must have the shape \(batch, length\)"),
        (
            {"attention_mask": torch.tensor([[0, 1]] * 2)},
            r"\(batch, length\), \(1, 2\), got \(2, 2\)",
        ),
        ({"attention_mask": torch.ones(1, 1)}, r"\(batch, length\), \(1, 2\), got \(1, 1\)"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, r"\(1, 2\), got \(1, 3\)"),
    ],
)
def test_what_is_not_supported_is_refused(
    make: Make, given: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        hf.wrap(make("h3"))(torch.zeros(1, 2, dtype=torch.int64), **given)


def test_ways_to_generate_that_need_other_models_are_refused(make: Make, prompt: Tensor) -> None:
    wrapped = hf.wrap(make("h3"))
    with pytest.raises(InputError, match="no outputs after some of its layers"):
        wrapped.generate(prompt[:1], assistant_early_exit=1, max_new_tokens=2, do_sample=False)
    with pytest.raises(InputError, match="got cache_implementation=static: leave it out"):
        wrapped.generate(prompt[:1], cache_implementation="static", max_new_tokens=2)
    with pytest.raises(InputError, match="a state of its own: use generate, or stateline serve"):
        wrapped.generate_batch(prompt.tolist())


def test_a_call_without_tokens_is_refused(make: Make) -> None:
    with pytest.raises(InputError, match="give either input_ids or inputs_embeds"):
        hf.wrap(make("h3"))()
    with pytest.raises(InputError, match=r"embeddings must be .* d_model=32\), got .*2, 8"):
        hf.wrap(make("h3"))(inputs_embeds=torch.zeros(1, 2, 8))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_embeddings_are_read_as_the_tokens_they_stand_for(
    make: Make, padded: bool, cached: bool
) -> None:
    wrapped, ids = hf.wrap(make("h3 attention")), torch.arange(10).view(2, 5)
    mask = torch.ones_like(ids)
    mask[0, :2] = 1 - padded
    embeds = wrapped.get_input_embeddings()(ids)
    given = {"attention_mask": mask, "use_cache": cached}
    wanted = wrapped(ids, **given).logits[mask.bool()]
    assert_close(wrapped(inputs_embeds=embeds, **given).logits[mask.bool()], wanted)
    length = {"max_new_tokens": 4, "do_sample": False, "attention_mask": mask}
    texts = wrapped.generate(ids, **length)[:, 5:]
    assert texts.equal(wrapped.generate(inputs_embeds=embeds, **length))


def test_prompts_that_peft_learns_get_gradients(make: Make) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, num_attention_heads=1, num_layers=1
    )
    tuned = peft.get_peft_model(hf.wrap(make("h3 attention").train()), settings)
    ids = torch.arange(8).view(2, 4)
    tuned(input_ids=ids, labels=ids).loss.backward()
    trained = [p for p in tuned.parameters() if p.requires_grad]
    assert [p.shape for p in trained] == [(3, 32)]
    assert all(p.grad.abs().sum() > 0 for p in trained)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("ids", [torch.zeros(3, dtype=torch.int64), [[0, 0]]])
def test_one_row_of_tokens_has_a_batch_axis(make: Make, ids: Any) -> None:
    with pytest.raises(
        InputError, match=r"tokens must be a tensor of shape \(batch, length\), got"
    ):
        hf.wrap(make("h3"))(ids)


@pytest.mark.parametrize("pattern", ["h3", "mamba2 attention"])
def test_packed_rows_are_read_as_transformers_passes_them(make: Make, pattern: str) -> None:
    wrapped = hf.wrap(make(pattern)).double().eval()
    texts = [torch.randint(60, (1, length)) for length in (4, 1, 6)]
    wanted = torch.cat([wrapped(text).logits for text in texts], dim=1)
    ids = torch.cat(texts, dim=1)
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    numbers = torch.tensor([[0] * 4 + [1] + [2] * 6], dtype=torch.int32)
    borders = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
    empty = torch.tensor([0, 0, 4, 5, 5, 11, 11], dtype=torch.int32)
    for given in (
        {"position_ids": positions},
        {"seq_idx": numbers},
        {"cu_seq_lens_q": borders},
        {"cu_seq_lens_q": empty},
    ):
        for use_cache in (True, False):
            found = wrapped(ids, use_cache=use_cache, **given)
            torch.testing.assert_close(found.logits, wanted)
    losses = [wrapped(text, labels=text, num_items_in_batch=1).loss for text in texts[::2]]
    packed = wrapped(ids, labels=ids, num_items_in_batch=1, position_ids=positions).loss
    torch.testing.assert_close(packed, sum(losses))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_cache_cannot_take_back_what_it_did_not_record(
    make: Make, prompt: Tensor, change: int
) -> None:
    cache = hf.wrap(make("h3"))(prompt).past_key_values
    with pytest.raises(InputError, match="can take back 0 tokens"):
        cache.crop(change)


@torch.no_grad()
def test_tokens_that_are_taken_back_are_read_anew(make: Make, prompt: Tensor) -> None:
    """They may be in a piece of several tokens or alone, and crop(0) may follow."""
    wrapped, row = hf.wrap(make("h3 attention(position=rope)")), prompt[:1]
    cache = wrapped(row[:, :2]).past_key_values
    cache.activate_past_recording()
    wrapped(torch.cat([row[:, 2:4], row[:, :2]], dim=1), past_key_values=cache)
    cache.crop(-2)
    cache.crop(0)
    wrapped(row[:, 4:5], past_key_values=cache)
    cache.crop(0)
    wrapped(row[:, :1], past_key_values=cache)
    cache.crop(-1)
    found = wrapped(row[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(found, wrapped(row, use_cache=False).logits[:, 5:])


def test_a_single_token_has_gradients_with_a_cache(make: Make, prompt: Tensor) -> None:
    wrapped = hf.wrap(make("h3 attention")).double()
    whole, first = (wrapped(prompt[:, :1], use_cache=cached).logits for cached in (False, True))
    whole.square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in wrapped.named_parameters()}
    wrapped.zero_grad()
    first.square().sum().backward()
    for name, parameter in wrapped.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_positions_of_padded_rows_count_their_tokens(
    make: Make, prompt: Tensor, side: str, use_cache: bool
) -> None:
    wrapped, batch = hf.wrap(make("h3"), pad_token_id=0), padded(ragged(prompt), side)
    mask = batch["attention_mask"]
    places = (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 0)
    wanted = wrapped(**batch, use_cache=use_cache).logits
    found = wrapped(**batch, use_cache=use_cache, position_ids=places).logits
    assert torch.equal(found, wanted)
    if side == "left":
        settings = {"use_cache": use_cache, "prefill_chunk_size": 4 if use_cache else None}
        text = greedy(wrapped, **batch, **settings)
        assert torch.equal(text, greedy(wrapped, **batch, **settings, position_ids=places))


def test_positions_go_on_where_a_cache_ends(make: Make, prompt: Tensor) -> None:
    wrapped, places = hf.wrap(make("h3")), torch.arange(9)[None]
    cache = wrapped(prompt[:, :5], position_ids=places[:, :5]).past_key_values
    found = wrapped(prompt[:, 5:], position_ids=places[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(found, wrapped(prompt, use_cache=False).logits[:, 5:])


@torch.no_grad()
def test_a_text_of_one_token_begins_anew_where_a_cache_ends(make: Make, prompt: Tensor) -> None:
    wrapped, first = hf.wrap(make("h3")), torch.zeros(3, 1, dtype=torch.int64)
    cache = wrapped(prompt).past_key_values
    found = wrapped(prompt[:, :1], position_ids=first, past_key_values=cache).logits
    torch.testing.assert_close(found, wrapped(prompt[:, :1], use_cache=False).logits)


@pytest.mark.parametrize("use_cache", [True, False])
def test_padding_under_a_mask_may_be_any_number(
    make: Make, prompt: Tensor, use_cache: bool
) -> None:
    wrapped, batch = hf.wrap(make("h3")), padded(ragged(prompt))
    wanted = wrapped(**batch, use_cache=use_cache).logits
    batch["input_ids"][batch["attention_mask"] == 0] = -100
    assert torch.equal(wrapped(**batch, use_cache=use_cache).logits, wanted)


def test_a_mask_of_other_columns_is_refused_with_a_cache(make: Make, prompt: Tensor) -> None:
    wrapped = hf.wrap(make("h3"))
    cache = wrapped(prompt).past_key_values
    with pytest.raises(InputError, match=r"\(3, 1\) or \(3, 10\) with .*, got \(3, 9\)"):
        wrapped(prompt[:, :1], attention_mask=torch.ones(3, 9), past_key_values=cache)


@pytest.mark.usefixtures("unannotated")
def test_other_caches_are_refused(make: Make, prompt: Tensor) -> None:
    from transformers import DynamicCache

    for call in (hf.wrap(make("h3")), hf.wrap(make("h3")).generate):
        with pytest.raises(InputError, match=r"must be a StatelineCache, .* got DynamicCache"):
            call(prompt, past_key_values=DynamicCache())
    with pytest.raises(InputError, match="state of its own, got cache_implementation=static"):
        hf.wrap(make("h3")).generate(prompt, max_new_tokens=2, cache_implementation="static")
