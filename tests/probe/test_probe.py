"""Probes: their examples, what is scored, going on after an interruption, and the command."""

import json
import os
import shutil
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from stateline.cli import main
from stateline.data import ByteTokenizer, CharacterTokenizer, load_tokenizer
from stateline.errors import InputError
from stateline.files import sole_writer
from stateline.models.checkpoint import save_model
from stateline.models.config import ModelConfig
from stateline.models.constructions.ngram_copier import ngram_copier
from stateline.models.language_model import LanguageModel
from stateline.probe import (
    PROBES,
    Example,
    Material,
    Plan,
    Reader,
    Settings,
    StatelineReader,
    load_reader,
    make_examples,
    read_probes,
    run_probes,
)
from stateline.probe.load import fingerprint
from stateline.probe.network import Network
from stateline.probe.results import FORMAT
from stateline.probe.run import needed
from stateline.probe.tasks import check_length
from stateline.runs.verdict import wilson

if not torch.cuda.is_available():  # the simulated device cannot stand beside a GPU
    from tests.devices import watch

TINY = Settings(error=0.0, examples=6, rows=4)


def encode(text: str) -> list[int]:
    return [*text.encode()]


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode()


def examples(task: str, length: int, sources: Path, n: int = 20, seed: str = "0") -> list[Example]:
    material = Material(sources)
    return [
        *make_examples(task, length, n, material=material, encode=encode, decode=decode, seed=seed)
    ]


class Oracle(Reader):
    """Answers with what follows the last earlier place of the prompt's end; knows no batches."""

    def __init__(self, name: str = "oracle", *, share: float = 1.0) -> None:
        self.name, self.max_len, self.end, self.share = name, None, frozenset(), share
        self.asked = 0

    def encode(self, text: str) -> list[int]:
        return encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return decode(tokens)

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: Sequence[int],
        stop: str,
        *,
        never_empty: bool,
    ) -> list[str]:
        return [self._continue(decode(prompt), stop) for prompt in prompts]

    def network(self) -> Network:
        raise NotImplementedError

    def _continue(self, prompt: str, stop: str) -> str:
        self.asked += 1
        if self.asked % 10 >= 10 * self.share:
            return "nothing"
        *_, last = prompt.split("\n\n")
        text = prompt.split("\n\n")[0]
        return text[text.index(last) + len(last) :] if stop == "\n\n" else self._look_up(prompt)

    def _look_up(self, prompt: str) -> str:
        asked = prompt.split("\n\n")[-1]
        return prompt[prompt.index(asked) + len(asked) :]


def plan(*tasks: str, lengths: Sequence[int] = (5,), settings: Settings = TINY) -> Plan:
    return Plan(["oracle"], tasks, lengths, settings)


@pytest.fixture(autouse=True)
def a_model_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folders of the oracles are empty."""
    monkeypatch.chdir(tmp_path)
    for name in ("oracle", "a", "b", "first", "second"):
        Path(name).mkdir()


def test_a_phone_book_holds_the_number_that_is_asked_for(sources: Path) -> None:
    for prompt, (number,) in examples("phone_book", 7, sources):
        book, shown, asked = prompt.split("\n\n")
        lines = book.splitlines()
        assert len(lines) == 7
        assert f"{asked} {number}" in lines
        assert set(shown.splitlines()) <= set(lines)
        assert all(line[line.index(": ") + 2] in "6789" for line in lines)
        assert all(len(line.split(": ")[1]) == 10 for line in lines)


def test_names_are_drawn_by_their_frequency(sources: Path) -> None:
    books = [example.prompt.split("\n\n")[0] for example in examples("phone_book", 50, sources)]
    last = Counter(line.split(":")[0].split()[1] for book in books for line in book.splitlines())
    shares = [last[name] / 1000 for name in ("Smith", "Lee", "Fox", "Ray")]
    assert shares == pytest.approx([0.357, 0.286, 0.214, 0.143], abs=0.05)
    first = Counter(line.split()[0] for book in books for line in book.splitlines())
    assert (first["John"] + first["Bob"]) / 1000 == pytest.approx(0.5, abs=0.05)


def test_a_shuffled_copy_has_the_tokens_of_a_window(sources: Path) -> None:
    text = (sources / "text" / "play.txt").read_text()
    for plain, mixed in zip(
        examples("copy", 40, sources), examples("shuffled_copy", 40, sources), strict=True
    ):
        assert plain.prompt.split("\n\n")[0] in text.replace("\n", " ") * 3
        assert mixed.prompt.split("\n\n")[0] not in text.replace("\n", " ") * 3
        for prompt, (rest,) in (plain, mixed):
            first, second, word = prompt.split("\n\n")
            assert first == second == f"{word} {rest}"


def test_windows_lie_anywhere_and_hold_two_words(sources: Path) -> None:
    copies = [prompt.split("\n\n")[0] for prompt, _ in examples("copy", 4, sources)]
    assert len(set(copies)) > 5
    assert all(" " in text for text in copies)
    with pytest.raises(InputError, match="no 1 tokens of the text hold two words"):
        examples("copy", 1, sources)


def test_letters_are_uniform_and_as_many_as_asked_for(sources: Path) -> None:
    found = Counter[str]()
    for prompt, _ in examples("letters", 60, sources, n=100):
        letters = prompt.split("\n\n")[0].split(" ")
        assert len(letters) == 60
        found.update(letters)
    assert len(found) == 26
    assert max(found.values()) < 1.5 * min(found.values())


def test_a_lookup_asks_for_the_letters_after_a_key_that_occurs_once(sources: Path) -> None:
    for length in (8, 60):
        for example in examples("ngram_lookup", length, sources, n=50):
            (answer,), (text, shown, asked) = example.accepted, example.prompt.split("\n\n")
            assert PROBES["ngram_lookup"].score(example, f" {answer} z\na b c: d") == (1, 1)
            assert len(text.split(" ")) == length
            for entry in (*shown.split("\n"), f"{asked} {answer}"):
                key, value = entry.split(": ")
                assert text.count(key) == 1
                assert f"{key} {value}" in text
                assert len(key) == len(value) == 5


def test_passages_are_binned_by_their_tokens(sources: Path) -> None:
    for prompt, accepted in examples("squad", 50, sources):
        passage, shown, asked = prompt.split("\n\n")
        assert len(passage) <= 50
        assert shown.startswith("Question: What is ")
        assert asked.endswith("\nAnswer: ")
        assert asked.split()[3] != shown.split()[3]
        assert len(accepted) == 2
    asked_for = {prompt.split()[-2] for prompt, _ in examples("squad", 50, sources)}
    assert asked_for == {"one?", "two?", "three?"}
    with pytest.raises(InputError, match="no passage has 451 to 500 tokens: the 3 passages have"):
        examples("squad", 500, sources)


def test_a_bin_holds_its_upper_border_alone(sources: Path) -> None:
    assert {len(prompt.split("\n\n")[0]) for prompt, _ in examples("squad", 112, sources)} == {112}
    with pytest.raises(InputError, match="no passage has 113 to 162 tokens"):
        examples("squad", 162, sources)


def test_a_copy_may_be_half_as_long_as_its_prompt_and_50_tokens_more() -> None:
    assert [PROBES["copy"].new_tokens(n) for n in (100, 201)] == [100, 150]


def test_examples_depend_on_seed_and_length_alone(sources: Path) -> None:
    assert examples("letters", 9, sources) == examples("letters", 9, sources)
    assert examples("letters", 9, sources) != examples("letters", 9, sources, seed="1")
    assert examples("letters", 9, sources, n=3) == examples("letters", 9, sources)[:3]
    (nine,), (ten,) = (examples("letters", n, sources, n=1) for n in (9, 10))
    assert not ten.prompt.startswith(nine.prompt.split("\n\n")[0])


def test_the_length_of_all_examples_together_is_limited() -> None:
    check_length("letters", 1 << 20, 32)
    with pytest.raises(InputError, match="33 examples of letters may have up to 33,554,432"):
        check_length("letters", 1 << 20, 33)


def test_the_sample_is_the_end_of_a_long_prompt() -> None:
    asked = plan("letters", lengths=[200])
    (point,) = run_probes(asked, Material(None), Oracle, Path("out")).points
    assert point.sample is not None
    accepted, prompt = point.sample.accepted[0], point.sample.prompt
    assert prompt[:-3] == accepted[3 - len(prompt) :]


@pytest.mark.parametrize(
    ("task", "length"), [("phone_book", 3), ("copy", 12), ("shuffled_copy", 12), ("letters", 12)]
)
def test_right_answers_score_one(task: str, length: int, sources: Path) -> None:
    material = Material(sources)
    results = run_probes(plan(task, lengths=[length]), material, Oracle, Path("out"))
    (point,) = results.points
    assert (point.examples, point.exact_match, point.f1) == (6, 1.0, 1.0)
    low, high = point.interval
    assert low == pytest.approx(6 / (6 + 1.96**2))  # an error even where all answers are right
    assert high == 1.0


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_as_many_examples_are_asked_as_the_error_needs(share: float) -> None:
    settings, reader = Settings(error=0.1, examples=200, rows=5), Oracle(share=share)
    (point,) = run_probes(
        plan("letters", settings=settings), Material(None), lambda _: reader, Path("out")
    ).points
    low, high = point.interval
    assert reader.asked == point.examples
    assert point.exact_match == pytest.approx(share, abs=0.1)
    assert high - low <= 0.2
    low, high = wilson(point.exact_match, point.examples - 2 * settings.rows)
    assert high - low > 0.2  # hardly more than needed
    assert needed(settings, 0.5) == 93
    few = settings._replace(examples=7)
    (point,) = run_probes(
        plan("letters", settings=few), Material(None), lambda _: reader, Path("few")
    ).points
    assert point.examples == 7


def test_a_forecast_comes_before_the_first_point() -> None:
    told: list[str] = []
    run_probes(
        plan("letters", lengths=[5, 6]),
        Material(None),
        lambda _: Oracle(),
        Path("out"),
        on_point=lambda point, _: told.append(str(point.length)),
        tell=told.append,
    )
    assert told == ["oracle: about 1 to 1 minutes", "5", "6"]
    run_probes(plan("letters"), Material(None), Oracle, Path("out"), tell=told.append)
    assert len(told) == 3  # nothing is missing


def test_a_second_start_measures_only_what_is_missing() -> None:
    folder, material, reader = Path("out"), Material(None), Oracle()
    seen: list[tuple[int, bool]] = []

    def stop(point: object, measured: bool) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_probes(
            plan("letters", lengths=[4, 6]),
            material,
            lambda _: reader,
            folder,
            on_point=stop,
        )
    assert [point.length for point in read_probes(folder).points] == [4]
    asked = reader.asked
    results = run_probes(
        plan("letters", lengths=[4, 6]),
        material,
        lambda _: reader,
        folder,
        on_point=lambda point, measured: seen.append((point.length, measured)),
    )
    assert seen == [(4, False), (6, True)]
    assert reader.asked == 2 * asked
    whole = run_probes(plan("letters", lengths=[4, 6]), material, Oracle, Path("whole"))
    assert [p.exact_match for p in results.points] == [p.exact_match for p in whole.points]


def test_a_folder_that_another_process_writes_is_refused() -> None:
    with sole_writer(Path("out")), pytest.raises(InputError, match="another process writes out"):
        run_probes(plan("letters"), Material(None), Oracle, Path("out"))


def test_nothing_is_loaded_if_nothing_is_missing() -> None:
    def refuse(name: str) -> Reader:
        raise AssertionError(name)

    first = run_probes(plan("letters"), Material(None), Oracle, Path("out"))
    assert run_probes(plan("letters"), Material(None), refuse, Path("out")) == first
    seed = plan("letters", settings=TINY._replace(seed=1))
    for other in (seed, plan("letters")._replace(dtype="bfloat16")):
        with pytest.raises(AssertionError, match="oracle"):
            run_probes(other, Material(None), refuse, Path("out"))


def test_other_data_is_measured_anew(sources: Path, tmp_path: Path) -> None:
    run_probes(plan("phone_book"), Material(sources), Oracle, Path("out"))
    for path in (sources / "names").iterdir():
        target = tmp_path / "other" / "names" / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text().replace("LEE", "LEA"))
    measured: list[bool] = []
    run_probes(
        plan("phone_book"),
        Material(tmp_path / "other"),
        Oracle,
        Path("out"),
        on_point=lambda _, new: measured.append(new),
    )
    assert measured == [True]


def test_another_tokenizer_is_measured_anew(tmp_path: Path) -> None:
    folder = our_model(tmp_path / "bytes")
    (tmp_path / "characters").mkdir()
    text = CharacterTokenizer("abcdefghijklmnopqrstuvwxyz \n")
    text.save(tmp_path / "characters" / "tokenizer.json")
    measured: list[bool] = []
    for tokenizer in (None, "byte", "byte", str(tmp_path / "characters")):
        run_probes(
            Plan([str(folder)], ["letters"], [5], TINY, tokenizer),
            Material(None),
            partial(load_reader, tokenizer=tokenizer),
            Path("out"),
            on_point=lambda _, new: measured.append(new),
        )
    assert measured == [True, True, False, True]
    text.save(tmp_path / "characters" / "tokenizer.json")  # the same name, at another time
    (spec, known) = (str(folder), str(tmp_path / "characters"))
    before = fingerprint(spec, known)
    CharacterTokenizer("ba").save(tmp_path / "characters" / "tokenizer.json")
    other = fingerprint(spec, known)
    assert other != before
    os.utime(tmp_path / "characters" / "tokenizer.json", ns=(0, 0))
    assert fingerprint(spec, known) not in (before, other)


def test_a_model_is_freed_before_the_next_is_read(sources: Path) -> None:
    class Silent(Oracle):
        def _continue(self, prompt: str, stop: str) -> str:
            return "nothing"

    read: list[weakref.ref[Reader]] = []

    def load(name: str) -> Reader:
        assert all(reader() is None for reader in read)
        reader = Silent(name)
        read.append(weakref.ref(reader))
        return reader

    both = Plan(["first", "second"], ["squad"], [50], TINY)
    assert len(run_probes(both, Material(sources), load, Path("out")).points) == 2


def test_damaged_data_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "play.jsonl").write_text("{}")
    with pytest.raises(InputError, match="a field text"):
        run_probes(plan("letters", "copy"), Material(tmp_path), Oracle, Path("out"))
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[" * 100_000, "line 2 of .*play.jsonl is nested too deeply"),
        ('{"text": 5}', "a field text that is a string, got 5 in line 2"),
        ('{"txt": "a"}', "a field text that is a string, got None in line 2"),
        ("[]", "must be a JSON object, got a list"),
    ],
)
def test_a_damaged_line_of_documents_is_one_line(line: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "play.jsonl").write_text(f'{{"text": "a\u2028b"}}\n{line}\n')
    with pytest.raises(InputError, match=reason):
        examples("copy", 5, tmp_path)


@pytest.mark.parametrize(
    ("task", "file", "text", "reason"),
    [
        ("phone_book", "names/dist.all.last", "", "must not be negative, with a sum above 0"),
        ("phone_book", "names/dist.all.last", "LEE nan", "with a sum above 0"),
        ("phone_book", "names/dist.all.last", "LEE inf", "with a sum above 0"),
        ("phone_book", "names/dist.all.last", "LEE -1\nFOX 2", "must not be negative"),
        ("phone_book", "names/dist.all.last", "LEE", "must hold a name and its frequency"),
        ("copy", "text/play.txt", b"\xff", "is not UTF-8 text"),
        ("squad", "qa/dev.json", '{"data": [{"paragraphs": [{"context": 5}]}]}', "5 is no text"),
        ("squad", "qa/dev.json", "[]", "must be a JSON object"),
    ],
)
def test_a_damaged_data_file_is_one_line(
    task: str, file: str, text: str | bytes, reason: str, sources: Path, tmp_path: Path
) -> None:
    shutil.copytree(sources, tmp_path / "bad")
    (tmp_path / "bad" / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=reason):
        examples(task, 5, tmp_path / "bad")


def test_a_line_separator_inside_of_a_document_ends_no_line(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "play.jsonl").write_text('{"text": "a\u2028b"}\n\n{"text": "c"}\n')
    assert Material(tmp_path).documents == ["a\u2028b", "c"]


def test_a_document_of_plain_text_ends_at_the_first_blank_line_after_its_length(
    tmp_path: Path,
) -> None:
    (tmp_path / "text").mkdir()
    for name in "caebd":  # no order that a folder may have by itself
        (tmp_path / "text" / f"{name}.txt").write_text(f"{name * 2000}\n\nto be\n\nor not")
    (tmp_path / "text" / "f.txt").write_text("f" * 2000 + "\n\n")
    documents = Material(tmp_path).documents
    assert documents[:2] == ["a" * 2000 + "\n\n", "to be\n\nor not\n\n"]
    assert [document[0] for document in documents[::2]] == list("abcdef")
    assert len(documents) == 11


def test_damaged_results_are_one_line() -> None:
    run_probes(plan("letters"), Material(None), Oracle, Path("out"))
    path = Path("out/probes.json")
    path.write_text(path.read_text().replace(FORMAT, "another format"))
    with pytest.raises(InputError, match="is damaged"):
        read_probes(Path("out"))


def test_a_model_that_writes_no_text_is_measured(tmp_path: Path) -> None:
    model = ngram_copier(1, n_letters=252)
    with torch.no_grad():
        model.head.weight.zero_()[200] = model.head.weight.new_ones(())  # half a character
    save_model(model, tmp_path / "half")
    plan = Plan([str(tmp_path / "half")], ["letters"], [5], TINY)
    (point,) = run_probes(plan, Material(None), load_reader, Path("out")).points
    assert point.exact_match == 0


def our_model(folder: Path, **settings: object) -> Path:
    torch.manual_seed(0)
    config = ModelConfig("attention", vocab_size=256, d_model=16, **settings)
    save_model(LanguageModel(config), folder)
    return folder


def test_a_prompt_beyond_the_models_positions_is_skipped(tmp_path: Path) -> None:
    folder = our_model(tmp_path / "short", max_len=64)
    model = str(folder)
    chosen = Plan([model], ["letters"], [5, 40], TINY)
    short, long = run_probes(chosen, Material(None), load_reader, Path("out")).points
    assert not short.skipped
    assert "the model was made for 64" in long.skipped
    told: list[str] = []
    chosen = Plan([model], ["letters"], [40], TINY)
    run_probes(chosen, Material(None), load_reader, Path("long"), tell=told.append)
    assert told == [f"{model}: nothing can be measured"]


def test_the_space_before_an_answer_needs_a_position(tmp_path: Path) -> None:
    models = [str(our_model(tmp_path / str(size), max_len=size)) for size in (30, 31)]
    plan = Plan(models, ["letters"], [5], TINY)
    short, long = run_probes(plan, Material(None), load_reader, Path("out")).points
    assert short.skipped == "needs 31 tokens; the model was made for 30"
    assert not long.skipped


@pytest.mark.cpu  # the hooks of --device keep transformers from loading weights
@pytest.mark.parametrize("name", ["pythia", "mamba"])
def test_our_reader_and_transformers_write_the_same(name: str, tiny: Path) -> None:
    ours, theirs = load_reader(str(tiny / name)), load_reader(f"hf:{tiny / name}")
    prompts = ["to be or not", "suffer", "whether it is nobler to be"]
    tokens = [ours.prompt(text) for text in prompts]
    assert tokens == [theirs.prompt(text) for text in prompts]
    limits = [12, 5, 9]
    found, wanted = (
        reader.answer(tokens, limits, "\n\n", never_empty=True) for reader in (ours, theirs)
    )
    assert found == wanted
    alone = [
        reader.answer([t], [n], "\n\n", never_empty=True)[0]
        for reader in (ours, theirs)
        for t, n in zip(tokens, limits, strict=True)
    ]
    assert alone == found * 2


@pytest.mark.cpu  # the hooks of --device keep transformers from loading weights
def test_an_exported_model_is_read_like_the_model_itself(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = our_model(tmp_path / "bytes")
    assert main(["export", str(folder), str(tmp_path / "exported")]) == 0
    given = ([[*b"to be or not"], [*b"suffer"]], [9, 5], "\n")
    readers = [load_reader(str(folder)), load_reader(f"hf:{tmp_path / 'exported'}")]
    found, wanted = (reader.answer(*given, never_empty=False) for reader in readers)
    assert found == wanted


def test_an_end_token_ends_a_text_but_may_be_kept_from_being_the_first(tiny: Path) -> None:
    for spec in (str(tiny / "mamba"), f"hf:{tiny / 'mamba'}"):
        reader = load_reader(spec)
        tokens = [reader.prompt("to be")]
        free = reader.answer(tokens, [4], "\n\n", never_empty=False)
        first = reader.encode(free[0])[0]
        reader.end = frozenset([first])
        assert reader.answer(tokens, [4], "\n\n", never_empty=False) == [""]
        (text,) = reader.answer(tokens, [4], "\n\n", never_empty=True)
        assert text
        assert reader.encode(text)[0] != first


@pytest.mark.cpu  # the hooks of --device keep transformers from loading weights
def test_all_end_tokens_of_a_generation_config_end_a_text(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny / "pythia", tmp_path / "own")
    (text,) = load_reader(str(folder)).answer([[70, 71]], [8], "\n\n", never_empty=False)
    last = load_reader(str(folder)).encode(text)[-1]
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [0, last]}))
    readers = [load_reader(spec) for spec in (str(folder), f"hf:{folder}")]
    found, wanted = (r.answer([[70, 71]], [8], "\n\n", never_empty=False) for r in readers)
    assert readers[0].end == readers[1].end == {0, last}
    assert found == wanted
    assert len(found[0]) < len(text)


@pytest.mark.cpu  # the hooks of --device keep transformers from loading weights
def test_special_tokens_and_the_end_may_be_those_of_the_tokenizer(
    tiny: Path, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder, end = shutil.copytree(tiny / "pythia", tmp_path / "own"), "<|endoftext|>"
    for path in (folder / "config.json", folder / "generation_config.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": None}))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    for spec in (f"hf:{folder}", str(folder)):
        reader = load_reader(spec)
        assert reader.end == {0}
        assert reader.prompt("to be") == [0, *reader.encode("to be")]


def gpt2(tiny: Path, folder: Path) -> Reader:
    """Reads at most 64 tokens."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=320, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return load_reader(f"hf:{folder}", tokenizer=str(tiny / "pythia" / "tokenizer.json"))


def test_only_learned_positions_limit_the_length(tiny: Path, tmp_path: Path) -> None:
    assert gpt2(tiny, tmp_path / "gpt2").max_len == 64
    assert load_reader(f"hf:{tiny / 'pythia'}").max_len is None


@pytest.mark.cpu  # the hooks of --device keep transformers from loading weights
def test_a_long_answer_needs_no_positions_after_a_longer_prompt(tiny: Path, tmp_path: Path) -> None:
    reader = gpt2(tiny, tmp_path / "gpt2")
    prompts, limits = [[1] * 60, [2] * 20, [3] * 30], [4, 44, 34]
    found = reader.answer(prompts, limits, "\n\n", never_empty=False)
    pairs = zip(prompts, limits, strict=True)
    assert found == [reader.answer([p], [n], "\n\n", never_empty=False)[0] for p, n in pairs]


@pytest.mark.parametrize(
    ("fault", "batching"),
    [("", "padded"), ("ignores the mask", "equal lengths"), ("mixes rows", "single rows")],
)
def test_padding_is_used_only_if_the_model_allows_it(fault: str, batching: str) -> None:
    pytest.importorskip("transformers")
    from stateline.probe.hugging_face import _batching
    from tests.hf_check.toy import toy

    assert _batching(toy(fault)) == batching


@pytest.mark.slow
def test_all_probes_run_from_the_command_line(
    sources: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = f"text(path={sources / 'text' / 'play.txt'}, length=16, batch_size=2)"
    train = ["train", "lstm", "--task", task, "--train.steps", "2", "--model.d_model", "16"]
    assert main([*train, "--out", "mine", "--device", "cpu"]) == 0
    sizes = ["--lengths", "50", "--examples", "2", "--device", "cpu"]
    models = ["mine", str(tiny / "pythia"), str(tiny / "mamba")]
    models += [f"hf:{tiny / 'pythia'}", f"hf:{tiny / 'mamba'}"]
    capsys.readouterr()
    assert main(["probe", *models, "--tasks", *PROBES, "--data", str(sources), *sizes]) == 0
    shown = capsys.readouterr().out
    assert shown.count(": exact match ") == 30
    results = json.loads(Path("runs/probes/probes.json").read_text())
    assert len(results["points"]) == 30
    page = Path("runs/probes/probes.html").read_text()
    assert all(probe.title in page for probe in PROBES.values())
    assert page.count('data-chart="probe-') == len(PROBES)


def test_a_length_that_the_data_do_not_have_is_skipped_and_the_rest_is_measured(
    sources: Path,
) -> None:
    plan = Plan(["a", "b"], ["letters", "squad", "phone_book"], [9], Settings(0.0, 2))
    results = run_probes(plan, Material(sources), Oracle, Path("out"))
    points = results.points
    assert [results.models(task) for task in plan.tasks] == [["a", "b"], [], ["a", "b"]]
    assert [(p.model, p.task) for p in points] == [(m, t) for m in plan.models for t in plan.tasks]
    assert [bool(point.examples) for point in points] == [True, False, True] * 2
    assert points[1].skipped.startswith("no passage has 1 to 9 tokens")


def test_a_page_that_cannot_be_written_is_found_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    our_model(Path("bytes"))
    Path("out/probes.html").mkdir(parents=True)
    assert main(["probe", "bytes", "--lengths", "5", "--out", "out"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot write out/probes.html" in line
    assert not Path("out/probes.json").exists()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("nowhere", "nowhere"),
        ("hf:nowhere", "no model in nowhere: there is no such folder"),
        ("bytes --tasks phonebook", "did you mean 'phone_book'"),
        ("bytes --tasks copy", "give --data a folder that holds text/"),
        ("bytes --tasks copy --data bytes", "there are no .txt or .jsonl files in bytes/text"),
        ("bytes --lengths 0", "at least 2 for letters, got 0"),
        ("bytes --tasks letters phone_book --lengths 2", "at least 3 for phone_book, got 2"),
        ("bytes --tasks letters --lengths 1", "at least 2 for letters, got 1"),
        ("bytes --lengths 1000000000", "640 examples of letters may have up to 33,554,432 letters"),
        ("bytes --examples 0", "examples must be at least 1"),
        ("bytes --tasks letters --tokenizer nowhere.json", "nowhere.json"),
    ],
)
def test_a_mistake_is_one_line(
    command: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    our_model(Path("bytes"))
    assert main(["probe", *command.split(), "--out", "out"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert not Path("out").exists()


def test_a_damaged_model_of_transformers_is_one_line(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken").mkdir()
    for path in (tiny / "pythia").iterdir():
        Path("broken", path.name).write_bytes(path.read_bytes())
    Path("broken/model.safetensors").write_bytes(b"no weights")
    capsys.readouterr()
    assert main(["probe", "hf:broken", "--lengths", "5"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "transformers cannot read the model" in line


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_code_in_the_folder_of_a_model_is_never_run(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    assert main(["export", str(our_model(Path("bytes"))), "evil"]) == 0
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(str(text)) or "y")
    Path("evil/evil_code.py").write_text("from pathlib import Path\nPath('harm').touch()\n")
    if part == "model":
        auto = {"AutoConfig": "evil_code.Config", "AutoModelForCausalLM": "evil_code.Model"}
        Path("evil/config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    Path("evil/tokenizer.json").unlink()
    described = {"auto_map": {"AutoTokenizer": ["evil_code.Evil", None]}}
    Path("evil/tokenizer_config.json").write_text(json.dumps(described))
    capsys.readouterr()
    assert main(["probe", "hf:evil", "--tasks", "letters", "--out", "out"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"transformers cannot read {'the model' if part == 'model' else 'a tokenizer'}" in line
    assert asked == []
    assert not Path("harm").exists()
    assert not Path("out").exists()


@pytest.mark.slow
def test_real_data_gives_prompts_of_every_default_length(data: Path) -> None:
    tokenizer = load_tokenizer(data / "tokenizer" / "gpt-neox-20b" / "20B_tokenizer.json")
    material, tokens = Material(data), {}

    def encoded(text: str) -> list[int]:
        return tokenizer.encode(text).tolist()

    for task in ("phone_book", "letters", "squad"):  # the whole text folder is large
        for length in PROBES[task].lengths:
            (example,) = make_examples(
                task, length, 1, material=material, encode=encoded, decode=tokenizer.decode
            )
            tokens[task, length] = len(encoded(example.prompt))
    assert tokens["phone_book", 200] > 2000  # about the 2,048 positions of Pythia
    assert 2 * 300 + 2 < tokens["letters", 300] < 2 * 300 + 10  # a token per letter
    assert all(0 < tokens["squad", n] - n < 150 for n in PROBES["squad"].lengths)


@pytest.mark.skipif(torch.cuda.is_available(), reason="its device is simulated")
def test_our_models_are_probed_on_their_device_alone() -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig("h3 attention", vocab_size=256, d_model=8)).eval()
    prompts, limits = [encode("to be"), encode("or not to")], [9, 5]
    texts = []
    for device in ("cpu", "fake"):
        reader = StatelineReader("ours", model.to(device), ByteTokenizer())
        reader.end = frozenset([0])
        with watch() as counts:
            texts.append(reader.answer(prompts, limits, "\n", never_empty=True))
    assert texts[0] == texts[1]
    assert counts.heavy_on_cpu == set()
