"""Kept states: the longest kept beginning of a text continues, with the bits of the same cuts."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.generate import PrefixStates, Sampling, SessionState, generate, prefill
from stateline.layers import nbytes
from stateline.layers.state import leaves_of
from stateline.models.language_model import LanguageModel

Build = Callable[..., LanguageModel]
KINDS = ["h3(d_state=8)", "attention(position=rope) h3(d_state=8)", "lstm mamba(d_state=4)"]
KINDS += ["sliding_attention gated_delta_net", "ladder(attention(position=alibi) rg_lru)"]
TEXT = torch.randint(11, (40,), generator=torch.Generator().manual_seed(1))


def same(a: SessionState, b: SessionState) -> bool:
    return all(map(torch.equal, pytree.tree_leaves(a), pytree.tree_leaves(b)))


def cut(model: LanguageModel, tokens: Tensor, sizes: list[int]) -> list[Tensor]:
    """The tensors of the model's state after chunks of these sizes."""
    state = model.init_state(1)
    with torch.inference_mode():
        for chunk in tokens[None, : sum(sizes)].split(sizes, dim=1):
            state = model.forward_chunk(chunk, state, keep=0)[1]
    return pytree.tree_leaves(state)


@pytest.mark.parametrize("pattern", KINDS)
def test_a_continued_text_has_the_bits_of_a_text_with_the_same_cuts(
    build: Build, pattern: str
) -> None:
    """The last token is not fed, so a text of 13 tokens ends with a cut at 12."""
    model = build(pattern)
    states = PrefixStates(model, every=8)
    assert states.read(TEXT[:13]).reused == 0
    longer = states.read(TEXT[:30])
    assert longer.reused == 13
    wanted = cut(model, TEXT, [8, 4, 4, 8, 5])
    assert all(map(torch.equal, pytree.tree_leaves(longer.state.model), wanted))
    assert longer.state.seen.equal(prefill(model, TEXT[None, :30]).seen)


@pytest.mark.parametrize("pattern", KINDS)
def test_a_text_that_continues_at_a_multiple_has_the_bits_of_prefill(
    build: Build, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateline.generate.session_state.PREFILL_CHUNK", 8)
    model = build(pattern)
    states = PrefixStates(model, every=8)
    states.read(TEXT[:17])
    found = states.read(TEXT)
    assert found.reused == 17
    assert same(found.state, prefill(model, TEXT[None]))
    again = states.read(TEXT)
    assert again.reused == 40
    assert same(again.state, found.state)


@pytest.mark.parametrize("length", range(1, 26))
def test_the_longest_beginning_continues_at_its_token(build: Build, length: int) -> None:
    model = build("h3(d_state=8) attention")
    states = PrefixStates(model, every=16)
    states.read(TEXT[:length])
    other = torch.cat([TEXT[:length], (TEXT[length:] + 1) % 11])
    assert states.read(other).reused == length
    wanted = prefill(model, other[None])
    found = states.read(other).state
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_states_on_the_way_serve_texts_that_branch_off(build: Build) -> None:
    states = PrefixStates(build("h3(d_state=8)"), every=8)
    states.read(TEXT)
    branch = TEXT.clone()
    branch[20] = (branch[20] + 1) % 11
    assert states.read(branch).reused == 17  # 16 tokens were fed, one is not


def test_a_piece_is_no_longer_than_a_chunk_of_prefill_however_rarely_states_are_kept(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server decodes other texts between two pieces."""
    for module in ("prefixes", "session_state"):
        monkeypatch.setattr(f"stateline.generate.{module}.PREFILL_CHUNK", 8)
    model = build("h3(d_state=8)")
    states = PrefixStates(model, every=20)
    assert list(states.pieces(TEXT)) == [8, 8, 4, 8, 8, 3]
    assert len(states) == 2
    wanted = cut(model, TEXT, [8, 8, 4, 8, 8, 3])
    assert all(map(torch.equal, pytree.tree_leaves(states.read(TEXT).state.model), wanted))


def test_a_text_can_be_read_in_pieces_under_its_hash(build: Build) -> None:
    model = build("h3(d_state=8)")
    states = PrefixStates(model, every=8)
    first = states.read(TEXT[:10])
    second = states.read(TEXT[10:25], first.key)
    assert second.state.length == 25
    assert states.read(TEXT[:25]) == (second.state, second.key, 25)
    assert states.read([], second.key) == (second.state, second.key, 0)
    with pytest.raises(InputError, match="is no longer kept: give the whole text"):
        states.read([1], b"?" * 32)


def test_the_text_before_may_be_written_by_another_process_at_any_time(
    build: Build, tmp_path: Path
) -> None:
    model = build("h3(d_state=8)")
    one, other = (PrefixStates(model, folder=tmp_path) for _ in range(2))
    read = one.read(TEXT[:10])
    one.flush()
    assert other.read(TEXT[10:], read.key).state.length == 40
    assert other.on_disk == one.on_disk > 0


@pytest.mark.parametrize("rows", [TEXT[:10].view(2, 5), [[1, 2], [3, 4]]], ids=["tensor", "list"])
@pytest.mark.usefixtures("unannotated")
def test_several_rows_are_no_text(build: Build, rows: Any) -> None:
    with pytest.raises(InputError, match=r"shape \(length,\), got \(2, .\): read each row"):
        PrefixStates(build("h3(d_state=8)")).read(rows)


def test_what_does_not_fit_goes_to_disk_and_comes_back(build: Build, tmp_path: Path) -> None:
    model = build("h3(d_state=8) attention(position=rope)")
    one = nbytes(prefill(model, TEXT[None]))
    states = PrefixStates(model, every=100, memory=2 * one, folder=tmp_path)
    read = [states.read(TEXT.roll(shift)) for shift in range(5)]
    assert states.in_memory <= 2 * one
    assert len(list(tmp_path.glob("*.state"))) == 3 == len(states) - 2
    again = states.read(TEXT)
    assert again.reused == 40
    assert same(again.state, read[0].state)
    states.flush()
    new = PrefixStates(model, folder=tmp_path)
    for shift in range(5):
        found = new.read(TEXT.roll(shift))
        assert found.reused == 40
        assert same(found.state, read[shift].state)
    assert new.in_memory == sum(nbytes(one.state) for one in read)


def test_without_a_folder_the_least_recently_used_states_are_lost(build: Build) -> None:
    model = build("h3(d_state=8)")
    states = PrefixStates(model, every=100, memory=2 * nbytes(prefill(model, TEXT[None])))
    for shift in (0, 1, 0, 2):
        states.read(TEXT.roll(shift))
    assert [states.read(TEXT.roll(shift)).reused for shift in (0, 2, 1)] == [40, 40, 0]


def test_a_state_that_is_kept_again_is_the_most_recently_used(build: Build) -> None:
    model = build("h3(d_state=8)")
    states = PrefixStates(model, every=100, memory=2 * nbytes(prefill(model, TEXT[None])))
    first, second, third = (PrefixStates(model).read(TEXT.roll(shift)) for shift in range(3))
    for read in (first, second, first, third):
        states.keep(read.key, read.state)
    assert [states.get(read.key) is None for read in (first, second, third)] == [False, True, False]


def test_the_folder_is_bounded_and_loses_the_least_recently_used(
    build: Build, tmp_path: Path
) -> None:
    model = build("h3(d_state=8)")
    states = PrefixStates(model, every=100, folder=tmp_path)
    states.keep(states.read(TEXT).key, states.read(TEXT).state, now=True)
    size = states.on_disk
    states = PrefixStates(model, every=100, memory=1, folder=tmp_path, disk=2 * size + size // 2)
    for shift in (1, 0, 2):
        states.read(TEXT.roll(shift))
    assert states.on_disk == sum(p.stat().st_size for p in tmp_path.iterdir()) == 2 * size
    assert [states.read(TEXT.roll(shift)).reused for shift in (2, 0, 1)] == [40, 40, 0]


@pytest.mark.parametrize("pattern", ["attention(position=rope)", "attention(position=none)"])
def test_states_of_other_models_are_never_found_and_stay(
    build: Build, tmp_path: Path, pattern: str
) -> None:
    """Models may differ in their weights alone, or in their configuration alone."""
    states = PrefixStates(build("attention(position=rope)"), folder=tmp_path)
    states.read(TEXT)
    states.flush()
    assert len(states) == 1
    other = build(pattern)
    with torch.no_grad():
        other.embedding.weight.add_(float(pattern == "attention(position=rope)"))
    assert PrefixStates(other, folder=tmp_path).read(TEXT).reused == 0
    assert PrefixStates(states.model, folder=tmp_path).read(TEXT).reused == 40


def test_a_used_file_is_marked_as_used_for_other_processes(build: Build, tmp_path: Path) -> None:
    model = build("h3(d_state=8)")
    states = PrefixStates(model, folder=tmp_path)
    states.read(TEXT)
    states.flush()
    (file,) = tmp_path.iterdir()
    os.utime(file, (0, 0))
    assert PrefixStates(model, folder=tmp_path).read(TEXT).reused == 40
    assert file.stat().st_mtime > 0


@pytest.mark.parametrize("oldest", [0, 1])
def test_the_file_that_was_not_used_for_longest_leaves_the_folder(
    build: Build, tmp_path: Path, oldest: int
) -> None:
    model = build("h3(d_state=8)")
    states = PrefixStates(model, every=100, folder=tmp_path)
    keys = [states.read(TEXT.roll(shift)).key for shift in range(2)]
    states.flush()
    files = [tmp_path / f"{key.hex()}.state" for key in keys]
    os.utime(files[oldest], (0, 0))
    states = PrefixStates(model, every=100, folder=tmp_path, disk=states.on_disk)
    states.read(TEXT.roll(2))
    states.flush()
    assert [file.exists() for file in files] == [oldest == 1, oldest == 0]


def test_a_damaged_file_is_a_state_that_is_not_there(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("h3(d_state=8)")
    states = PrefixStates(model, every=100, folder=tmp_path)
    states.read(TEXT)
    states.flush()
    (file,) = tmp_path.iterdir()
    os.truncate(file, 100)
    states = PrefixStates(model, folder=tmp_path)
    assert states.read(TEXT).reused == 0
    assert "a kept state is not used: cannot read" in caplog.text
    assert states.on_disk == 0


def test_a_folder_that_cannot_be_written_loses_states_and_ends_no_text(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states = PrefixStates(build("h3(d_state=8)"), memory=1, folder=tmp_path / "kept")
    (tmp_path / "kept").rmdir()
    (tmp_path / "kept").touch()
    assert states.read(TEXT).reused == 0
    states.flush()
    assert (len(states), states.in_memory, states.on_disk) == (0, 0, 0)
    assert "a kept state is not written: cannot write" in caplog.text


@pytest.mark.parametrize("pattern", KINDS)
def test_generation_continues_the_conversation_that_it_kept(build: Build, pattern: str) -> None:
    model = build(pattern)
    states = PrefixStates(model, every=8)
    prompt = torch.stack([TEXT[:12], TEXT[12:24]])
    first = generate(model, prompt, 9, prefixes=states)
    assert first.equal(generate(model, prompt, 9))
    conversation = torch.cat([prompt, first, prompt[:, :5]], dim=1)
    assert [states.read(row).reused for row in conversation] == [21, 21]
    found = generate(model, conversation, 9, prefixes=states)
    assert found.equal(generate(model, conversation, 9))


def test_a_seed_fixes_the_tokens_that_follow_kept_states(build: Build) -> None:
    model = build("h3(d_state=8)")
    prompt, sampling = torch.stack([TEXT[:12], TEXT[12:24]]), Sampling(temperature=2.0)
    states = PrefixStates(model, every=8)
    for seed in range(3):
        found = generate(model, prompt, 9, sampling=sampling, seed=seed, prefixes=states)
        assert found.equal(generate(model, prompt, 9, sampling=sampling, seed=seed))


@pytest.mark.parametrize("limit", [{"every": 0}, {"memory": 0}, {"disk": -1}])
def test_limits_are_positive(build: Build, limit: dict[str, int]) -> None:
    with pytest.raises(InputError, match="every, memory and disk must be positive, got"):
        PrefixStates(build("lstm"), **limit)


@pytest.mark.parametrize(
    ("tokens", "message"), [([], "the prompt is empty"), ([11], "11"), ([-1], "-1")]
)
def test_wrong_tokens_are_refused(build: Build, tokens: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PrefixStates(build("lstm")).read(tokens)


def test_hashes_are_computed_by_pieces(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    states = PrefixStates(build("lstm"), every=8)
    whole = states.read(TEXT)
    monkeypatch.setattr("stateline.generate.prefixes.HASHED_AT_ONCE", 10)
    assert list(states.pieces([*TEXT.tolist(), 1])) == [0] * (len(TEXT) // 10) + [1]
    again = states.read(TEXT)
    assert (again.key, again.reused) == (whole.key, len(TEXT))


def test_kept_states_hold_no_more_memory_than_they_say(build: Build) -> None:
    states = PrefixStates(build("attention(position=rope) h3"))
    for length in (1, 2, 3000):
        state = states.read([1] * length).state
        held = sum(leaf.untyped_storage().nbytes() for leaf in leaves_of(state))
        assert held == nbytes(state), length
