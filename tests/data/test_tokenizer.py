import json
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateline.data import ByteTokenizer, CharacterTokenizer, Tokenizer, load_tokenizer
from stateline.data.tokenizer import FILE
from stateline.errors import InputError

KINDS = ["byte", "character", "bpe"]
TEXT = "Hé 😀 naïve 日本語, the theory of the thing\r\n"
GPT2_WORLD = [15496, 995]


@pytest.fixture
def tokenizer(kind: str, bpe: Path) -> Tokenizer:
    if kind == "character":
        return CharacterTokenizer.of([TEXT])
    return load_tokenizer("byte" if kind == "byte" else bpe)


def in_pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    decoder = tokenizer.decoder()
    return [*map(decoder.push, tokens), decoder.finish()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_comes_back_from_its_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_is_no_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("").shape == (0,)
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_64_bit_integers_below_the_vocabulary_size(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    assert tokens.dtype == "int64"
    assert 0 <= tokens.min() <= tokens.max() < tokenizer.vocab_size


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_says_the_same_and_never_half_a_character(tokenizer: Tokenizer) -> None:
    pieces = in_pieces(tokenizer, tokenizer.encode(TEXT).tolist())
    assert "".join(pieces) == TEXT
    assert pieces[-1] == ""
    assert not any("\ufffd" in piece or not piece.isprintable() for piece in pieces[:20])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(20))
def test_a_decoder_says_the_same_of_any_tokens(tokenizer: Tokenizer, seed: int) -> None:
    drawn = random.Random(seed)
    largest = drawn.choice([tokenizer.vocab_size, min(200, tokenizer.vocab_size)]) - 1
    tokens = [drawn.randint(0, largest) for _ in range(150)]
    assert "".join(in_pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_a_long_run_of_broken_characters_is_not_held_back_for_ever(bpe: Path) -> None:
    tokenizer = load_tokenizer(bpe)
    broken = next(
        n for n in range(tokenizer.vocab_size) if tokenizer.decode([n, n]) == "\ufffd" * 2
    )
    *pieces, rest = in_pieces(tokenizer, [broken] * 200)
    assert "".join([*pieces, rest]) == tokenizer.decode([broken] * 200)
    assert len(rest) < 40


def sentencepiece(path: Path) -> Tokenizer:
    """A vocabulary of bytes and a few words; other characters become tokens of their bytes."""
    package = pytest.importorskip("tokenizers")
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "ing", "x"]
    model = package.models.Unigram([(name, -1.0) for name in names], unk_id=0, byte_fallback=True)
    made = package.Tokenizer(model)
    made.normalizer = package.normalizers.Replace(" ", "▁")
    replaced = package.decoders.Replace("▁", " ")
    parts = [replaced, package.decoders.ByteFallback(), package.decoders.Fuse()]
    made.decoder = package.decoders.Sequence(parts)
    made.save(str(path))
    return load_tokenizer(path)


@pytest.mark.parametrize("words", [["😀", "日本", "é", " the", "ing"], ["😀", "日本", "é\n"]])
def test_characters_that_are_tokens_of_bytes_are_not_broken(
    words: list[str], tmp_path: Path
) -> None:
    tokenizer = sentencepiece(tmp_path / "tokenizer.json")
    for seed in range(20):
        text = "".join(random.Random(seed).choices(words, k=100))
        pieces = in_pieces(tokenizer, tokenizer.encode(text).tolist())
        assert "".join(pieces) == text
        assert max(map(len, pieces)) < 8  # shown at once


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_is_read_back_from_its_file_or_folder(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    for spec in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        again = load_tokenizer(spec)
        assert again.to_json() == tokenizer.to_json()
        assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


ADDED = {"__type": "AddedToken", "content": "th", "normalized": False}


@pytest.mark.parametrize("end", ["th", ADDED])
def test_the_settings_beside_a_tokenizer_name_its_end_of_text(
    end: object, bpe: Path, tmp_path: Path
) -> None:
    """As of tokenizers of chats, whose answers end with such as <|im_end|>."""
    pytest.importorskip("tokenizers")
    here, copy = tmp_path / FILE, tmp_path / "run" / FILE
    shutil.copy(bpe, here)
    assert load_tokenizer(here).end_of_text is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    named = load_tokenizer(here)
    assert named.end_of_text == named.encode("th")[0]
    copy.parent.mkdir()
    named.save(copy)
    assert load_tokenizer(copy.parent).end_of_text == named.end_of_text


@pytest.mark.parametrize(("named", "others"), [([97, 98, 10**6, -1], {97, 98}), (97, {97})])
def test_a_generation_config_beside_a_tokenizer_names_further_end_tokens(
    named: object, others: set[int], bpe: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tokenizers")
    shutil.copy(bpe, tmp_path / FILE)
    assert load_tokenizer(tmp_path).end_tokens == set()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "th"}')
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.end_tokens == {tokenizer.end_of_text, *others}
    (tmp_path / "run").mkdir()
    tokenizer.save(tmp_path / "run" / FILE)
    assert load_tokenizer(tmp_path / "run").end_tokens == tokenizer.end_tokens


CHAT = "{{ messages[0].content }}"
SEVERAL = [{"name": "tools", "template": "{{ tools }}"}, {"name": "default", "template": CHAT}]


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("tokenizer_config.json", json.dumps({"chat_template": CHAT})),
        ("tokenizer_config.json", json.dumps({"chat_template": SEVERAL})),
        ("chat_template.jinja", CHAT),
    ],
)
def test_the_template_of_chats_goes_with_a_tokenizer(
    place: str, text: str, bpe: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tokenizers")
    shutil.copy(bpe, tmp_path / FILE)
    (tmp_path / place).write_text(text)
    (tmp_path / "run").mkdir()
    load_tokenizer(tmp_path).save(tmp_path / "run" / FILE)
    settings = json.loads((tmp_path / "run" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == CHAT


def beginning_with(name: str, bpe: Path, folder: Path, end: str = "") -> Path:
    """A folder with a tokenizer whose post-processor puts tokens before and after a text."""
    package = pytest.importorskip("tokenizers")
    made = package.Tokenizer.from_file(str(bpe))
    names = [part for part in (name, end) if part]
    made.post_processor = package.processors.TemplateProcessing(
        single=[name, "$A", *names[1:]], special_tokens=[(n, made.token_to_id(n)) for n in names]
    )
    made.save(str(folder / FILE))
    return folder


def test_a_prompt_has_the_tokens_that_the_tokenizer_puts_before_a_text_once(
    bpe: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(beginning_with("a", bpe, tmp_path, end="c"))
    (a,), the = tokenizer.encode("a"), tokenizer.encode("the").tolist()
    assert tokenizer.beginning == (a,)
    assert tokenizer.begin_of_text == a
    assert tokenizer.prompt("the").tolist() == [a, *the]
    assert tokenizer.prompt("athe").tolist() == tokenizer.encode("athe").tolist()
    assert tokenizer.prompt("").tolist() == [a]
    bare = tokenizer.without_beginning()
    assert bare.prompt("the").tolist() == the
    assert bare.begin_of_text is None
    bare.save(tmp_path / FILE)
    assert load_tokenizer(tmp_path).prompt("the").tolist() == the


def test_settings_name_the_token_that_begins_a_text_where_it_is_not_put_there(
    bpe: Path, tmp_path: Path
) -> None:
    """Scores of whole texts begin after it; transformers ignores ``add_bos_token`` here."""
    pytest.importorskip("tokenizers")
    shutil.copy(bpe, tmp_path / FILE)
    settings = {"bos_token": "b", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "run").mkdir()
    load_tokenizer(tmp_path).save(tmp_path / "run" / FILE)
    for folder in (tmp_path, tmp_path / "run"):
        tokenizer = load_tokenizer(folder)
        assert tokenizer.beginning == ()
        assert tokenizer.begin_of_text == tokenizer.encode("b")[0]
        assert tokenizer.without_beginning().begin_of_text is None
        assert tokenizer.without_beginning().to_json() == tokenizer.to_json()


@pytest.mark.parametrize("add", [True, False, None])
def test_the_settings_beside_the_two_files_of_gpt2_say_whether_a_token_begins_a_text(
    add: bool | None, bpe: Path, tmp_path: Path
) -> None:
    """As those of OPT."""
    pytest.importorskip("tokenizers")
    model = json.loads(bpe.read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "a", "add_bos_token": add}
    settings |= {"eos_token": "a", "unk_token": "a"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    (a,), the = tokenizer.encode("a"), tokenizer.encode("the").tolist()
    assert tokenizer.prompt("the").tolist() == ([a, *the] if add else the)
    assert tokenizer.begin_of_text == a


@pytest.mark.parametrize("kind", KINDS)
def test_most_tokenizers_put_nothing_before_a_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.prompt(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    assert tokenizer.begin_of_text is None
    assert tokenizer.without_beginning() is tokenizer


def test_an_end_of_text_that_the_vocabulary_lacks_is_added_as_in_transformers(
    bpe: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    shutil.copy(bpe, tmp_path / FILE)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.end_of_text == load_tokenizer(bpe).vocab_size
    assert tokenizer.encode("<|im_end|>").tolist() == [tokenizer.end_of_text]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_outside_the_vocabulary_is_refused(tokenizer: Tokenizer, token: int) -> None:
    for use in (tokenizer.decode, lambda tokens: tokenizer.decoder().push(tokens[0])):
        with pytest.raises(InputError, match=rf"^tokens must be from 0 to \d+, got {token} to "):
            use([token])


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_in_the_padding_of_a_models_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    tokenizer.padded_size = tokenizer.vocab_size + 2
    padding = [tokenizer.vocab_size, tokenizer.vocab_size + 1]
    tokens = tokenizer.encode(TEXT).tolist()
    mixed = [*padding, *tokens[:3], padding[1], *tokens[3:], *padding]
    assert tokenizer.decode(mixed) == "".join(in_pieces(tokenizer, mixed)) == TEXT
    with pytest.raises(InputError, match="tokens must be from 0 to"):
        tokenizer.decode([tokenizer.vocab_size + 2])


@given(text=st.text())
def test_bytes_are_those_of_utf_8(text: str) -> None:
    tokens = ByteTokenizer().encode(text)
    assert bytes(tokens.tolist()) == text.encode()
    assert ByteTokenizer().decode(tokens) == text


@given(contents=st.binary())
def test_bytes_that_are_not_utf_8_pass_unharmed(contents: bytes) -> None:
    text = contents.decode(errors="surrogateescape")
    tokens = ByteTokenizer().encode(text).tolist()
    assert bytes(tokens) == contents
    assert "".join(in_pieces(ByteTokenizer(), tokens)) == ByteTokenizer().decode(tokens) == text


@given(texts=st.lists(st.text(min_size=1), min_size=1))
def test_characters_are_sorted_and_come_back(texts: list[str]) -> None:
    tokenizer = CharacterTokenizer.of(texts)
    assert list(tokenizer.characters) == sorted(set("".join(texts)))
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(InputError, match="has no character 'z'"):
        CharacterTokenizer("abc").encode("abz")


def test_truncation_and_padding_of_a_file_are_ignored(bpe: Path, tmp_path: Path) -> None:
    described = json.loads(bpe.read_text())
    described["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    wanted = load_tokenizer(bpe).encode(TEXT).tolist()
    assert load_tokenizer(tmp_path).encode(TEXT).tolist() == wanted


@pytest.mark.parametrize("names", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
def test_the_two_files_of_gpt2_make_the_same_tokenizer(
    bpe: Path, tmp_path: Path, names: tuple[str, str]
) -> None:
    model = json.loads(bpe.read_text())["model"]
    (tmp_path / names[0]).write_text(json.dumps(model["vocab"]))
    merges = "".join(" ".join(pair) + "\n" for pair in model["merges"])
    (tmp_path / names[1]).write_text("#version: 0.2\n" + merges)
    tokens = load_tokenizer(tmp_path).encode(TEXT)
    assert tokens.tolist() == load_tokenizer(bpe).encode(TEXT).tolist()


def test_gpt2_has_the_tokens_that_everyone_knows(data: Path) -> None:
    tokenizer = load_tokenizer(data / "tokenizer" / "gpt2")
    assert tokenizer.vocab_size == 50257
    assert tokenizer.encode("Hello world").tolist() == GPT2_WORLD
    assert tokenizer.encode(" world").tolist() == GPT2_WORLD[1:]


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox-20b/20B_tokenizer.json"])
def test_real_tokenizers_never_give_half_a_character(data: Path, name: str) -> None:
    tokenizer = load_tokenizer(data / "tokenizer" / name)
    pieces = in_pieces(tokenizer, tokenizer.encode(TEXT).tolist())
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({}, r"no tokenizer in .*: it needs tokenizer.json, or encoder.json or vocab.json and "),
        ({"encoder.json": "{}"}, "no tokenizer in "),
        ({"encoder.json": "{", "vocab.bpe": ""}, "the tokenizer in .* is damaged: "),
        ({"tokenizer.json": "{"}, "the tokenizer .*tokenizer.json is not JSON: "),
        ({"tokenizer.json": "{}"}, "tokenizer.json is not a tokenizer: .*; give a tokenizer.json"),
        ({"tokenizer.json": "[1]"}, "tokenizer.json must be a JSON object, got a list"),
        ({"tokenizer.json": '{"type": "stateline-character"}'}, "is damaged: it has no characters"),
        (
            {"tokenizer.json": '{"type": "stateline-character", "characters": "aa"}'},
            "must be non-empty and unique, got 'aa'",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_one_line(
    tmp_path: Path, contents: dict[str, str], message: str
) -> None:
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer_is_one_line() -> None:
    with pytest.raises(InputError, match=r"^there is no tokenizer bytes: give 'byte'"):
        load_tokenizer("bytes")


@pytest.mark.parametrize("pair", [True, False])
def test_a_missing_package_is_named(
    bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: bool
) -> None:
    for name in ("encoder.json", "vocab.bpe"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"pip install 'stateline\[hf\]'"):
        load_tokenizer(tmp_path if pair else bpe)


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match=r"got .*ud800.* at character 1"):
        tokenizer.encode("a\ud800")


def test_a_text_without_tokens_is_one_line(tmp_path: Path) -> None:
    package = pytest.importorskip("tokenizers")
    words = package.Tokenizer(package.models.WordLevel({"a": 0}, unk_token="[UNK]"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match=r"cannot encode the text: .*UNK.*; use one that knows"):
        load_tokenizer(tmp_path).encode("b")


def test_an_expression_that_the_package_gives_up_is_one_line(bpe: Path, tmp_path: Path) -> None:
    """The package panics, which is no Exception."""
    described = json.loads(bpe.read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    described["pre_tokenizer"] = {**pattern, "invert": False}
    (tmp_path / FILE).write_text(json.dumps(described))
    with pytest.raises(InputError, match="cannot encode the text: ") as caught:
        load_tokenizer(tmp_path).encode("a" * 40 + "b")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "inside"), [("normalizer", "normalizers"), ("decoder", "decoders")]
)
def test_replacements_that_make_a_text_much_longer_are_refused(
    part: str, inside: str, bpe: Path, tmp_path: Path
) -> None:
    described = json.loads(bpe.read_text())
    longer = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    described[part] = {"type": "Sequence", inside: [longer] * 4}
    (tmp_path / FILE).write_text(json.dumps(described))
    with pytest.raises(InputError, match=r"may make a text 1e\+08 times longer: at most 64 "):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_nothing_is_refused(tmp_path: Path) -> None:
    package = pytest.importorskip("tokenizers")
    package.Tokenizer(package.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="has no tokens: give another"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("contents", ["[" * 100_000, "[1, 2]", "null", "3" * 6000])
def test_a_tokenizer_of_another_type_is_one_line(tmp_path: Path, contents: str) -> None:
    (tmp_path / "tokenizer.json").write_text(contents)
    with pytest.raises(InputError, match="tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
