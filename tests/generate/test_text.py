"""Text as it comes: nothing uncertain is shown, and an interruption changes nothing."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stateline.data import ByteTokenizer, CharacterTokenizer, Decoder, Tokenizer, load_tokenizer
from stateline.errors import InputError
from stateline.generate import Session, TextStream, decode_text, prefill
from stateline.models.language_model import LanguageModel


class Pieces(Tokenizer):
    """Tokens of several characters each, whose borders may be anywhere."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces, self.vocab_size = pieces, len(pieces)

    def encode(self, text: str) -> np.ndarray:
        raise NotImplementedError

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        return "".join(self.pieces[token] for token in tokens)

    def decoder(self) -> Decoder:
        return PiecesDecoder(self.pieces)

    def to_json(self) -> str:
        raise NotImplementedError


class PiecesDecoder(Decoder):
    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def push(self, token: int) -> str:
        return self.pieces[token]

    def finish(self) -> str:
        return ""


PIECES = st.lists(st.text("ab\n", max_size=4), min_size=1, max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def first_stop(text: str, stop: Sequence[str]) -> str | None:
    """What comes before the stop string that is complete first, read character by character."""
    for end in range(len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))]
    return None


@given(PIECES, STOPS)
def test_a_text_ends_before_the_first_stop_string_wherever_tokens_end(
    pieces: list[str], stop: list[str]
) -> None:
    stream = TextStream(Pieces(pieces), stop)
    shown = "".join(stream.push(token) for token in range(len(pieces))) + stream.finish()
    wanted = first_stop("".join(pieces), stop)
    assert stream.stopped is (wanted is not None)
    assert shown == ("".join(pieces) if wanted is None else wanted)


@given(PIECES, STOPS)
def test_exactly_what_may_become_a_stop_string_is_held_back(
    pieces: list[str], stop: list[str]
) -> None:
    stream, shown, text = TextStream(Pieces(pieces), stop), "", ""
    for token, piece in enumerate(pieces):
        shown, text = shown + stream.push(token), text + piece
        if stream.stopped:
            break
        begun = [n for s in stop for n in range(len(s)) if text.endswith(s[:n])]
        assert shown == text[: len(text) - max(begun, default=0)]


TEXTS = ["né 🙂 fin", "\udcff\udc80é", "ab" * 40, "🙂🙂", ""]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stop", [[], ["b a", "fi!"], ["🙂f"]])
def test_an_interruption_anywhere_changes_nothing(text: str, stop: list[str]) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text).tolist()
    whole = TextStream(tokenizer, stop)
    wanted = "".join(map(whole.push, tokens)) + whole.finish()
    for cut in range(len(tokens) + 1):
        head = TextStream(tokenizer, stop)
        shown = "".join(map(head.push, tokens[:cut]))
        tail = TextStream(tokenizer, stop, head.hold())
        shown += "".join(map(tail.push, tokens[cut:])) + tail.finish()
        assert shown == wanted


def test_an_interruption_inside_a_character_of_byte_pairs_changes_nothing(data: Path) -> None:
    gpt2 = load_tokenizer(data / "tokenizer" / "gpt2")
    text = "It is ‍🙂 née 🧮🧮 " * 9
    tokens = gpt2.encode(text).tolist()
    for cut in range(len(tokens) - 30, len(tokens)):
        head = TextStream(gpt2)
        shown = "".join(map(head.push, tokens[:cut]))
        tail = TextStream(gpt2, (), head.hold())
        assert shown + "".join(map(tail.push, tokens[cut:])) + tail.finish() == text


def test_what_is_held_for_an_interruption_stays_small() -> None:
    stream = TextStream(ByteTokenizer(), ["never"])
    for token in b"x" * 1000:
        stream.push(token)
    held = stream.hold()
    assert held.tokens.numel() + held.text.numel() < 40


def test_nothing_comes_after_a_stop_string() -> None:
    stream = TextStream(ByteTokenizer(), ["c"])
    shown = [stream.push(token) for token in b"abcde\xc3"]
    assert ([*shown, stream.finish()], stream.stopped) == (["a", "b", "", "", "", "", ""], True)


class Ended(ByteTokenizer):
    """Bytes, of which 0 ends a text."""

    end_of_text = 0


def test_the_token_for_the_end_of_text_ends_it_with_all_that_was_held_back() -> None:
    stream = TextStream(Ended(), ["END"])
    shown = [stream.push(token) for token in b"xEN\xc3\0D"]
    found = [*shown, stream.finish()], stream.stopped
    assert found == (["x", "", "", "", "EN\udcc3", "", ""], True)


def test_any_end_token_ends_a_text(tmp_path: Path) -> None:
    words(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257, 258]}')
    for end in (257, 258):
        stream = TextStream(load_tokenizer(tmp_path))
        assert stream.push(end) == ""
        assert stream.stopped


def test_a_text_kept_at_its_end_goes_on_after_it() -> None:
    stream = TextStream(Ended())
    shown = [stream.push(token) for token in b"a\0"]
    tail = TextStream(Ended(), (), stream.hold())
    assert [*shown, *map(tail.push, b"b"), tail.finish()] == ["a", "", "b", ""]


def test_a_text_kept_at_a_stop_string_goes_on_after_it() -> None:
    stream = TextStream(ByteTokenizer(), ["END"])
    shown = [stream.push(token) for token in b"a stEND"]
    tail = TextStream(ByteTokenizer(), ["END"], stream.hold())
    assert "".join([*shown, *map(tail.push, b" b"), tail.finish()]) == "a st b"


def test_a_character_begun_at_the_end_is_shown_at_the_end() -> None:
    stream = TextStream(ByteTokenizer())
    assert [stream.push(token) for token in b"a\xc3"] == ["a", ""]
    assert stream.finish() == "\udcc3"


@pytest.mark.parametrize("stop", [["a", ""], ""], ids=["list", "string"])
def test_an_empty_stop_string_is_refused(stop: Sequence[str]) -> None:
    with pytest.raises(InputError, match="a stop string must not be empty: give at least one"):
        TextStream(ByteTokenizer(), stop)


def test_one_stop_string_needs_no_list() -> None:
    stream = TextStream(ByteTokenizer(), "END")
    assert "".join(map(stream.push, b"DEN, END")) + stream.finish() == "DEN, "


def words(folder: Path) -> Tokenizer:
    """A tokenizer that leaves out the space before the first word, as that of Llama 2 does."""
    package = pytest.importorskip("tokenizers")
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁sea"]
    model = package.models.Unigram([(name, -1.0) for name in names], unk_id=0, byte_fallback=True)
    made = package.Tokenizer(model)
    made.normalizer = package.normalizers.Sequence(
        [package.normalizers.Prepend("▁"), package.normalizers.Replace(" ", "▁")]
    )
    kind = package.decoders
    parts = [kind.Replace("▁", " "), kind.ByteFallback(), kind.Fuse(), kind.Strip(" ", 1, 0)]
    made.decoder = kind.Sequence(parts)
    made.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def test_the_first_word_after_a_prompt_keeps_its_space(tmp_path: Path) -> None:
    tokenizer = words(tmp_path)
    prompt, new = tokenizer.encode("the").tolist(), tokenizer.encode("sea").tolist()
    stream = TextStream(tokenizer, after=prompt)
    tail = TextStream(tokenizer, (), stream.hold())  # also where nothing came before a break
    for text in (stream, tail):
        assert "".join(map(text.push, new)) + text.finish() == " sea"
    first = TextStream(tokenizer)
    assert "".join(map(first.push, new)) + first.finish() == "sea"


def test_no_character_of_a_prompt_is_written_again(tmp_path: Path) -> None:
    half, rest = [0xC3 + 1], [0xA9 + 1]  # the bytes of é
    for prompt in (half, [*half, *half]):
        stream = TextStream(words(tmp_path), after=prompt)
        written = "".join(map(stream.push, [*rest, ord("a") + 1])) + stream.finish()
        assert written == "\ufffd\ufffd"  # a run of bytes that is no UTF-8 is broken as a whole
    stream = TextStream(ByteTokenizer(), after=[0xC3])
    assert "".join(map(stream.push, b"\xa9a")) + stream.finish() == "\udca9a"


def test_rows_that_stop_drop_out_and_the_others_go_on(build: Callable[..., LanguageModel]) -> None:
    model, letters = build("h3(d_state=8) attention"), CharacterTokenizer("abcdefghijk")
    prompts = [torch.tensor([1, 2, 3]), torch.tensor([5]), torch.tensor([9, 0])]

    def texts(stop: list[str]) -> tuple[list[str], int]:
        streams = [TextStream(letters, stop) for _ in prompts]
        shown, count = [""] * 3, 0
        for row, _, _, text in decode_text(Session(model, prefill(model, prompts)), streams, 12):
            shown[row] += text
            count += 1
        return [text + stream.finish() for text, stream in zip(shown, streams, strict=True)], count

    whole, _ = texts([])
    stop = [whole[0][4]]
    found, count = texts(stop)
    assert found == [text.split(stop[0])[0] for text in whole]
    assert count == sum(min(12, len(text) + 1) for text in found) < 36


def test_writing_ends_when_all_rows_have_stopped(build: Callable[..., LanguageModel]) -> None:
    model, letters = build("h3(d_state=8)"), CharacterTokenizer("abcdefghijk")
    prompts = torch.tensor([[1, 2], [3, 4]])
    streams = [TextStream(letters, list("abcdefghijk")) for _ in prompts]
    written = list(decode_text(Session(model, prefill(model, prompts)), streams, 10))
    assert [w.row for w in written] == [0, 1]
