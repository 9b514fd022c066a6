"""What a folder of a run holds, and texts that come in pieces."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

from stateline.data import ByteTokenizer, CharacterTokenizer, Tokenizer, load_tokenizer
from stateline.errors import InputError
from stateline.generate import (
    NumberTokenizer,
    growing_layers,
    load_run,
    prefill,
    prefill_chunks,
    token_chunks,
)
from stateline.models.checkpoint import save_model
from stateline.models.config import ModelConfig
from stateline.models.convert.table import write_pretrained
from stateline.models.language_model import LanguageModel
from stateline.runs.evaluate import task_of_run
from stateline.runs.folder import check_imports

Build = Callable[..., LanguageModel]


def test_the_newest_checkpoint_of_a_run_is_its_model(build: Build, tmp_path: Path) -> None:
    for step, vocab_size in ((9, 5), (10, 6), (200, 7)):
        save_model(build("lstm", vocab_size), tmp_path / "checkpoints" / f"step-{step:08}")
    (tmp_path / "checkpoints" / "step-00000300").mkdir()  # nothing in it yet
    assert load_run(tmp_path)[0].config.vocab_size == 7
    assert load_run(tmp_path / "checkpoints" / "step-00000010")[0].config.vocab_size == 6
    save_model(build("lstm", 8), tmp_path)
    assert load_run(tmp_path)[0].config.vocab_size == 8


def test_a_comparison_is_told_to_hold_many(build: Build, tmp_path: Path) -> None:
    for name in ("b", "a"):
        save_model(build("lstm"), tmp_path / "runs" / name)
    with pytest.raises(InputError, match=r"holds 2 models: give the folder of one, as .*/runs/a$"):
        load_run(tmp_path)


@pytest.mark.parametrize("home", [".", "checkpoints/step-00000010"])
@pytest.mark.parametrize("asked", [".", "checkpoints/step-00000010"])
def test_a_tokenizer_lies_beside_the_model_or_the_checkpoints(
    build: Build, tmp_path: Path, home: str, asked: str
) -> None:
    save_model(build("lstm", 3), tmp_path / "checkpoints" / "step-00000010")
    CharacterTokenizer("abc").save(tmp_path / home / "tokenizer.json")
    assert load_run(tmp_path / asked)[1].decode([2, 0]) == "ca"


def test_a_checkpoint_can_be_named_from_its_own_folder(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(build("lstm", 3), tmp_path / "checkpoints" / "step-00000010")
    CharacterTokenizer("abc").save(tmp_path / "tokenizer.json")
    monkeypatch.chdir(tmp_path / "checkpoints")
    here = Path("step-00000010")
    check_imports(here)
    assert load_run(here)[1].decode([2, 0]) == "ca"
    assert task_of_run(here, "copying")[0] == "copying"


def test_without_a_tokenizer_256_tokens_are_bytes_and_others_numbers(
    build: Build, tmp_path: Path
) -> None:
    for size, kind in ((256, ByteTokenizer), (255, NumberTokenizer)):
        save_model(build("lstm", size), tmp_path / str(size))
        assert type(load_run(tmp_path / str(size))[1]) is kind


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(build: Build, tmp_path: Path) -> None:
    save_model(build("lstm", 3), tmp_path)
    CharacterTokenizer("abcd").save(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match=r"tokenizer.json has 4 tokens, but the model in .* 3: "):
        load_run(tmp_path)


def test_another_tokenizer_can_be_named(build: Build, tmp_path: Path) -> None:
    save_model(build("lstm", 256), tmp_path)
    CharacterTokenizer("abc").save(tmp_path / "other.json")
    tokenizer = load_run(tmp_path, tokenizer=tmp_path / "other.json")[1]
    assert tokenizer.decode([2, 0]) == "ca"
    assert tokenizer.decode([2, 200, 0]) == "ca"  # the model may write what has no text
    CharacterTokenizer("z").save(tmp_path / "tokenizer.json")
    assert type(load_run(tmp_path, tokenizer="byte")[1]) is ByteTokenizer


@pytest.mark.cpu
def test_a_published_model_may_be_a_file_or_a_folder_without_a_configuration(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig("h3", 16, 8)).eval()
    write_pretrained(model, tmp_path / "h3", "h3")
    (tmp_path / "h3" / "config.json").unlink()
    CharacterTokenizer("abc").save(tmp_path / "h3" / "tokenizer.json")
    tokens = torch.tensor([[1, 2, 0, 1]])
    for place in (tmp_path / "h3", tmp_path / "h3" / "model.pt"):
        found, tokenizer = load_run(place)
        assert tokenizer.decode([2, 0]) == "ca"
        with torch.no_grad():
            torch.testing.assert_close(found(tokens), model(tokens))


def test_a_folder_in_place_of_a_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    torch.save({"a": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(InputError, match=r"config\.json: it is a folder"):
        load_run(tmp_path)


def test_layers_that_grow_are_named(build: Build) -> None:
    assert growing_layers(build("h3 lstm s4d")) == []
    assert growing_layers(build("h3 attention ladder(attention) ladder(h3)")) == [
        "2 Attention",
        "4 Ladder",
    ]


def test_numbers_go_there_and_back() -> None:
    numbers = NumberTokenizer(300)
    assert numbers.encode(numbers.decode([3, 299, 0])).tolist() == [3, 299, 0]
    decoder = numbers.decoder()
    assert [decoder.push(3), decoder.push(299), decoder.finish()] == ["3 ", "299 ", ""]


@pytest.mark.parametrize("wrong", ["x", "1.5", f"{2**63}", "9" * 5000])
def test_a_word_that_is_no_number_is_named(wrong: str) -> None:
    with pytest.raises(InputError, match=f"got '{wrong[:20]}'"):
        NumberTokenizer(300).encode(f"3 {wrong} 4")


TEXT = "It's said -- so  \n\n they say:\tπ is 3.14159, né?\n" * 5 + "end\udcff\udcc3"


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
@pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), CharacterTokenizer.of([TEXT])], ids=["bytes", "characters"]
)
def test_the_pieces_of_a_text_are_the_text(tokenizer: Tokenizer, size: int) -> None:
    file = io.BytesIO(TEXT.encode(errors="surrogateescape"))
    pieces = list(token_chunks(file.read, tokenizer, size=size))
    assert torch.cat(pieces).tolist() == tokenizer.encode(TEXT).tolist()
    assert max(map(len, pieces)) <= size + 20  # what was left of the piece before


@pytest.mark.parametrize("size", [64, 100, 1000])
def test_byte_pairs_of_the_pieces_are_those_of_the_text(data: Path, size: int) -> None:
    gpt2 = load_tokenizer(data / "tokenizer" / "gpt2")
    text = TEXT[:-2] * 9
    pieces = token_chunks(io.BytesIO(text.encode()).read, gpt2, size=size)
    assert torch.cat(list(pieces)).tolist() == gpt2.encode(text).tolist()


def test_tokens_of_a_text_in_chunks_are_not_preceded_by_the_space_of_every_chunk(
    tmp_path: Path,
) -> None:
    """Tokenizers of SentencePiece put a space before the first word of a text."""
    package = pytest.importorskip("tokenizers")
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁sea"]
    model = package.models.Unigram([(name, -1.0) for name in names], unk_id=0, byte_fallback=True)
    made = package.Tokenizer(model)
    made.normalizer = package.normalizers.Sequence(
        [package.normalizers.Prepend("▁"), package.normalizers.Replace(" ", "▁")]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = load_tokenizer(tmp_path), "the sea and  the\nsea " * 100
    chunks = list(token_chunks(io.BytesIO(text.encode()).read, tokenizer, size=512))
    assert torch.cat(chunks).tolist() == tokenizer.encode(text).tolist()
    assert max(map(len, chunks)) < 1024  # they do not wait for the end of the text


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_the_first_chunk_alone_begins_a_text(size: int) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.beginning = (1,)
    file = io.BytesIO(TEXT.encode(errors="surrogateescape"))
    chunks = token_chunks(file.read, tokenizer, size=size, begins=True)
    assert torch.cat(list(chunks)).tolist() == [1, *tokenizer.encode(TEXT)]


def test_a_prompt_in_pieces_is_read_as_one(build: Build) -> None:
    model = build("attention(position=rope) h3(d_state=8)")
    tokens = torch.tensor([1, 2, 3, 4, 5, 6, 7])
    pieces = [tokens[:0], tokens[:1], tokens[1:4], tokens[:0], tokens[4:]]
    found, wanted = prefill_chunks(model, pieces, seed=3), prefill(model, tokens[None], seed=3)
    for leaf, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(leaf, other, rtol=1e-9, atol=1e-9)


def test_a_prompt_without_a_token_is_refused(build: Build) -> None:
    with pytest.raises(InputError, match="the prompt is empty: give at least one token"):
        prefill_chunks(build("lstm"), [torch.zeros(0, dtype=torch.int64)])
