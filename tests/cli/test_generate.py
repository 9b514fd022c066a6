"""``stateline generate``: what it prints, what it keeps, and what it refuses."""

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stateline.cli import main
from stateline.data import CharacterTokenizer
from stateline.generate import Penalties, generate, stream
from stateline.models.checkpoint import load_model, save_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.reports.format import short_bytes

pytestmark = pytest.mark.usefixtures("unannotated")

KINDS = ["h3(d_state=8)", "attention(position=rope) lstm", "ladder(attention h3(d_state=8))"]
LETTERS = "abcdefgh \n"
Say = Callable[..., str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of three models, whose tokens are letters, bytes and numbers."""
    folder = tmp_path_factory.mktemp("models")
    names = {f"letters{number}": (pattern, len(LETTERS)) for number, pattern in enumerate(KINDS)}
    names |= {"bytes": ("h3(d_state=8)", 256), "numbers": ("attention", 10)}
    for name, (pattern, vocab_size) in names.items():
        torch.manual_seed(1)
        model = LanguageModel(ModelConfig(pattern, vocab_size, 8, tie_embeddings=False)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        save_model(model, folder / name)
        if name.startswith("letters"):
            CharacterTokenizer(LETTERS).save(folder / name / "tokenizer.json")
    return folder


@pytest.fixture
def say(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    """Return what ``stateline generate MODEL ...`` prints; files are in a temporary folder."""

    def said(model: str, *arguments: object, code: int = 0, err: bool = False) -> str:
        capsys.readouterr()
        assert main(["generate", str(models / model), *map(str, arguments)]) == code
        shown = capsys.readouterr()
        return shown.err if err else shown.out

    return said


def numbers(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def test_the_text_is_the_prompt_and_what_the_model_gives(say: Say, models: Path) -> None:
    shown = say("letters0", "--prompt", "bad cab", "--temperature", 0, "--max_new_tokens", 9)
    found = generate(load_model(models / "letters0"), torch.tensor([numbers("bad cab")]), 9)
    assert shown == "bad cab" + "".join(LETTERS[token] for token in found[0]) + "\n"


SAMPLINGS: dict[str, list[Any]] = {
    "greedy": ["--temperature", 0],
    "greedy_penalty": ["--temperature", 0, "--repetition_penalty", 1.5],
    "sampled": ["--temperature", 1.2, "--top_k", 8, "--repetition_penalty", 1.3],
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("model", ["letters0", "letters1", "letters2", "bytes"])
def test_an_interrupted_text_is_the_uninterrupted_one(
    say: Say, tmp_path: Path, model: str, sampling: str
) -> None:
    options = SAMPLINGS[sampling]
    whole = say(model, "--prompt", "bad", *options, "--seed", 5, "--max_new_tokens", 40)
    for cut in (0, 1, 17):
        kept = tmp_path / f"kept{cut}"
        first = ["--seed", 5, "--max_new_tokens", cut, "--save_state", kept]
        head = say(model, "--prompt", "bad", *options, *first)
        middle = say(model, "--state", kept, *options, "--max_new_tokens", 3, "--save_state", kept)
        tail = say(model, "--state", kept, *options, "--max_new_tokens", 37 - cut)
        assert head + middle + tail == whole


def test_a_stop_string_begun_before_the_interruption_is_found_after_it(
    say: Say, tmp_path: Path
) -> None:
    options = ["--temperature", 0, "--max_new_tokens"]
    text = say("letters0", "--prompt", "bad", *options, 12)[3:-1]
    stop = text[4:7]
    wanted = text[: text.index(stop)]
    start = text.index(stop) + 1  # interrupted inside the stop string
    kept = tmp_path / "kept"
    head = say(
        *["letters0", "--prompt", "bad", *options, start, "--stop", stop, "--save_state", kept]
    )
    tail = say("letters0", "--state", kept, *options, 12 - start, "--stop", stop)
    assert (head, tail) == ("bad" + wanted, "\n")


@pytest.mark.slow
def test_another_process_goes_on(say: Say, models: Path, tmp_path: Path) -> None:
    options = ["--temperature", "1.1", "--repetition_penalty", "1.2", "--max_new_tokens"]
    whole = say("bytes", "--prompt", "né", *options, 30, "--seed", 2)
    kept = str(tmp_path / "kept")
    head = say("bytes", "--prompt", "né", *options, 13, "--seed", 2, "--save_state", kept)
    program = [sys.executable, "-c", "import sys; from stateline.cli import main; sys.exit(main())"]
    command = [*program, "generate", str(models / "bytes"), *options, "17", "--state", kept]
    done = subprocess.run(command, capture_output=True, check=True)
    assert head + done.stdout.decode() == whole


@pytest.mark.parametrize(
    ("option", "code", "told"),
    [("--prompt=bad", 0, ""), ("--stream", 2, "stateline: error: the prompt is empty: give at")],
)
def test_closed_streams_are_empty(models: Path, option: str, code: int, told: str) -> None:
    command = [sys.executable, "-m", "stateline", "generate", models / "letters0", option]
    closed = ["sh", "-c", 'exec "$@" <&- >&-', "sh", *command, "--max_new_tokens=2"]
    done = subprocess.run(closed, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_prompt_after_a_state_goes_on_with_the_conversation(
    say: Say, models: Path, tmp_path: Path
) -> None:
    options = ["--temperature", 0, "--max_new_tokens", 6]
    head = say("letters1", "--prompt", "bad", *options, "--save_state", tmp_path / "kept")
    tail = say("letters1", "--prompt", "cafe", *options, "--state", tmp_path / "kept")
    found = generate(load_model(models / "letters1"), torch.tensor([numbers(head + "cafe")]), 6)
    assert tail == "cafe" + "".join(LETTERS[token] for token in found[0]) + "\n"


def test_the_size_of_a_state_and_its_tokens_are_told(
    say: Say, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    told = say("letters1", "--prompt", "bad", "--max_new_tokens", 4, "--save_state", kept, err=True)
    size = short_bytes(load_model(models / "letters1").state_bytes(6))
    assert told == f"state: {size} after 7 tokens, in {kept}\n"
    told = say("letters1", "--state", kept, err=True)
    assert told == f"state: {size} after 7 tokens, from {kept}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    rows = ("--max_new_tokens", 4, "--save_state", kept)
    told = say("letters1", "--prompt", "bad", *rows, err=True)
    assert told == f"\nstate: {size} after 7 tokens, in {kept}\n"  # not behind the text
    told = say("letters1", "--prompt", "bad", *rows, "--log_probs", err=True)
    assert told == f"state: {size} after 7 tokens, in {kept}\n"


def test_a_seed_restarts_the_random_numbers_of_a_kept_state(say: Say, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    say("letters0", "--prompt", "bad", "--max_new_tokens", 4, "--save_state", kept)
    texts = [say("letters0", "--state", kept, *seed) for seed in ([], ["--seed", 7], ["--seed", 8])]
    assert len(set(texts)) == 3
    assert say("letters0", "--state", kept, "--seed", 7) == texts[1]


def test_a_batch_gives_what_each_prompt_gives_alone(say: Say, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("bad\na\ncabbage had\n")
    options = ["--temperature", 0, "--max_new_tokens", 12, "--stop", "a"]
    shown = say("letters1", "--prompts", tmp_path / "prompts", *options)
    results = [json.loads(line) for line in shown.splitlines()]
    assert [result["prompt"] for result in results] == ["bad", "a", "cabbage had"]
    for result in results:
        alone = say("letters1", "--prompt", result["prompt"], *options)
        assert alone == result["prompt"] + result["text"] + "\n"


def test_lines_of_a_file_of_prompts_end_at_newlines_alone(say: Say, tmp_path: Path) -> None:
    prompts = ["a\fb", "c\u2028d", "e\x1cf\x85g", "h"]
    (tmp_path / "prompts").write_bytes("\n".join(prompts).encode().replace(b"h", b"h\r\nh"))
    shown = say("bytes", "--prompts", tmp_path / "prompts", "--max_new_tokens", 1)
    told = [json.loads(line)["prompt"] for line in shown.removesuffix("\n").split("\n")]
    assert told == [*prompts, "h"]


def test_a_batch_from_a_state_forks_it(say: Say, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("bad\na\n")
    options = ["--temperature", 0, "--max_new_tokens", 7]
    say("letters1", "--prompt", "cab", *options, "--save_state", tmp_path / "kept")
    options += ["--state", tmp_path / "kept"]
    shown = say("letters1", "--prompts", tmp_path / "prompts", *options)
    for result in map(json.loads, shown.splitlines()):
        alone = say("letters1", "--prompt", result["prompt"], *options)
        assert alone == result["prompt"] + result["text"] + "\n"


def test_a_batch_from_a_state_has_its_seed(say: Say, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("bad\nbad\n")
    given = ["--state", tmp_path / "kept", "--max_new_tokens", 20]
    batches = []
    for seed in (5, 6):
        kept = ["--max_new_tokens", 4, "--seed", seed, "--save_state", tmp_path / "kept"]
        say("letters1", "--prompt", "cab", *kept)
        shown = say("letters1", "--prompts", tmp_path / "prompts", *given)
        first, second = (json.loads(line)["text"] for line in shown.splitlines())
        assert say("letters1", "--prompt", "bad", *given) == f"bad{first}\n"
        batches.append((first, second))
    assert len({*batches[0], *batches[1]}) == 4


def test_penalties_change_the_choice_as_in_the_server(say: Say, models: Path) -> None:
    model, text = load_model(models / "letters0"), CharacterTokenizer(LETTERS)
    given = ["letters0", "--prompt", "abc", "--temperature", 0, "--max_new_tokens", 20]
    plain = say(*given)
    for name in ("presence", "frequency"):
        penalties, tokens = Penalties(**{name: 2.0}), text.encode("abc").tolist()
        for _ in range(20):
            with torch.no_grad():
                logits = model(torch.tensor([tokens]))[0, -1]
            tokens.append(int(penalties(logits).argmax()))
            penalties.counts[tokens[-1]] += 1
        written = say(*given, f"--{name}_penalty", 2)
        assert written == text.decode(tokens) + "\n"
    assert written != plain


def test_tokens_end_a_text_after_the_least_number_of_them(
    say: Say, models: Path, tmp_path: Path
) -> None:
    text, given = CharacterTokenizer(LETTERS), ["letters0", "--temperature", 0]
    (tmp_path / "prompts").write_text("abc\nh")
    given += ["--prompts", tmp_path / "prompts", "--max_new_tokens", 12]
    free = [json.loads(line)["text"] for line in say(*given).splitlines()]
    end = int(text.encode(free[0][2])[0])
    ended = [json.loads(line)["text"] for line in say(*given, "--stop_token_ids", end).splitlines()]
    assert ended == [one.partition(free[0][2])[0] for one in free]
    more = say(*given, "--stop_token_ids", end, "--min_tokens", 6).splitlines()
    longer = [json.loads(line)["text"] for line in more]
    assert all(len(one) >= 6 and free[0][2] not in one[:6] for one in longer)


def test_log_probabilities_come_as_a_table(say: Say, models: Path) -> None:
    options = ["--temperature", 0, "--max_new_tokens", 5]
    shown = say("letters0", "--prompt", "bad", *options, "--log_probs")
    head, *lines = [line.split("\t") for line in shown.splitlines()]
    assert head == ["token", "log_prob", "text"]
    wanted = stream(load_model(models / "letters0"), torch.tensor([numbers("bad")]), 5)
    for line, choice in zip(lines, wanted, strict=True):
        assert int(line[0]) == int(choice.tokens)
        assert float(line[1]) == pytest.approx(float(choice.log_probs), abs=1e-6)
        assert json.loads(line[2]) == LETTERS[int(choice.tokens)]


def test_log_probabilities_of_a_batch_come_with_its_texts(say: Say, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("bad\na\n")
    options = ["--temperature", 0, "--max_new_tokens", 5, "--log_probs"]
    shown = say("letters0", "--prompts", tmp_path / "prompts", *options)
    for result in map(json.loads, shown.splitlines()):
        table = say("letters0", "--prompt", result["prompt"], *options).splitlines()[1:]
        assert result["tokens"] == [int(line.split("\t")[0]) for line in table]
        wanted = [float(line.split("\t")[1]) for line in table]
        assert result["log_probs"] == pytest.approx(wanted, abs=1e-6)
        assert all(-math.inf < value < 0 for value in result["log_probs"])


class Stdin:
    """A standard input that records the size of every read."""

    def __init__(self, text: bytes) -> None:
        self.file, self.buffer, self.asked = io.BytesIO(text), self, set[int]()

    def read(self, size: int) -> bytes:
        self.asked.add(size)
        return self.file.read(size)


def test_a_prompt_from_stdin_is_read_in_pieces(
    say: Say, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "bad cab\nfeed a " * 4_500  # more than one chunk
    stdin = Stdin(text.encode())
    monkeypatch.setattr("sys.stdin", stdin)
    shown = say("letters0", "--stream", "--temperature", 0, "--max_new_tokens", 6)
    found = generate(load_model(models / "letters0"), torch.tensor([numbers(text)]), 6)
    assert shown == "".join(LETTERS[token] for token in found[0]) + "\n"
    assert stdin.asked == {1 << 16}


def test_a_stream_goes_on_from_a_state(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--temperature", 0, "--max_new_tokens", 6, "--state", tmp_path / "kept"]
    say("letters0", "--prompt", "cab", *options[:4], "--save_state", tmp_path / "kept")
    monkeypatch.setattr("sys.stdin", Stdin(b"a bad cafe"))
    wanted = say("letters0", "--prompt", "a bad cafe", *options)
    assert "a bad cafe" + say("letters0", "--stream", *options) == wanted


def test_the_token_that_begins_a_text_is_read_once(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--temperature", 0, "--max_new_tokens", 3, "--log_probs"]
    kept = tmp_path / "kept"
    (tmp_path / "lines").write_text("ab\n")
    (tmp_path / "begun").write_text("\x01ab\n")

    def row(*arguments: object) -> object:
        return json.loads(say("bytes", *arguments, *options))["log_probs"]

    def streamed(text: str, *arguments: object) -> str:
        monkeypatch.setattr("sys.stdin", Stdin(text.encode()))
        return say("bytes", "--stream", *arguments, *options)

    def said(begin: str, lines: str) -> list[object]:
        shown = [
            say("bytes", "--prompt", f"{begin}ab", *options, "--save_state", kept),
            streamed(f"{begin}ab"),
            row("--prompts", tmp_path / lines),
        ]
        return [
            *shown,
            say("bytes", "--prompt", "ab", *options, "--state", kept),
            streamed("ab", "--state", kept),
            row("--prompts", tmp_path / "lines", "--state", kept),
        ]

    wanted = said("\x01", "begun")
    assert not any(a == b for a, b in zip(said("", "lines"), wanted, strict=True))
    monkeypatch.setattr("stateline.data.ByteTokenizer.beginning", (1,))
    assert said("", "lines") == wanted


def test_a_stream_through_a_state_that_grows_wants_force(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = say("letters1", "--stream", code=2, err=True)
    assert told == (
        "stateline: error: --stream needs a state that does not grow, but the state of 0 Attention "
        "grows: give --force to let memory grow with the text\n"
    )
    monkeypatch.setattr("sys.stdin", Stdin(b"bad"))
    assert say("letters1", "--stream", "--force", "--max_new_tokens", 3)


MISTAKES = [
    (["letters0", "--prompt", "a", "--stream"], "one of --prompt, --prompts and --stream, got pro"),
    (["letters0", "--prompts", "nowhere"], "cannot read the file of prompts nowhere: No such"),
    (["letters0", "--prompts", "empty"], "empty must have a prompt in every line, got an empty"),
    (["letters0", "--prompts", "gap"], "gap must have a prompt in every line, got an empty one"),
    (["letters0", "--prompts", "gap", "--save_state", "s"], "--save_state keeps one text, but"),
    (["letters0", "--prompt", "xyz"], "the tokenizer has no character 'x'"),
    (["letters0", "--prompt", "a", "--stop", ""], "a stop string must not be empty"),
    (["letters0", "--prompt", "a", "--repetition_penalty", "0"], "wants repetition_penalty to be"),
    (["letters0", "--prompt", "a", "--presence_penalty", "101"], "presence_penalty must be from"),
    (["letters0", "--prompt", "a", "--min_tokens", "-1"], "min_tokens must be at least 0"),
    (["letters0", "--prompt", "a", "--stop_token_ids", "10"], "tokens must be from 0 to 9"),
    (["letters0", "--prompt", "a", "--seed", "-1"], "seed must be from 0 to 2**63 - 1, got -1"),
    (["letters0", "--state", "nowhere"], "cannot read the state file nowhere: No such file or dir"),
    (["letters0", "--state", "gap"], "cannot read gap as a state: "),
    (["letters1", "--state", "kept"], "kept was saved by a model with another configuration"),
    (["letters1", "--state", "kept", "--force"], "kept holds the state of another kind of layer"),
    (["letters0", "--state", "kept", "--max_new_tokens", "-2"], "max_new_tokens must not be neg"),
    (["letters0", "--prompt", "a", "--save_state", "gap/s"], "cannot write gap/s: "),
    (["numbers", "--prompt", "1 b"], "so text must be token numbers, got 'b'"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_one_line(
    say: Say,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("")
    (tmp_path / "gap").write_text("a\n\nb\n")
    say("letters0", "--prompt", "a", "--max_new_tokens", 2, "--save_state", "kept")
    told = say(*arguments, code=2, err=True)
    *news, last = told.splitlines()
    assert all(line.startswith("state: ") for line in news)
    assert last.startswith("stateline: error: ")
    assert message in last


@pytest.mark.parametrize("model", ["letters0", "letters1", "letters2"])
def test_a_prefix_cache_saves_reading_and_changes_nothing(
    say: Say, tmp_path: Path, model: str
) -> None:
    cache = "--prefix_cache", tmp_path / "cache"
    settings = "--max_new_tokens", 12, "--temperature", 0
    told = say(model, "--prompt", "abcabc", *settings)
    assert say(model, "--prompt", "abcabc", *settings, *cache) == told
    longer = told[:-1] + "ba"
    wanted = say(model, "--prompt", longer, *settings)
    reused = f"prefix cache: {len(longer) - 2} of {len(longer)} tokens came with a kept state\n"
    arguments = "--prompt", longer, *settings, *cache
    assert say(model, *arguments, err=True) == reused
    assert say(model, *arguments) == wanted


def test_prompts_of_a_file_and_of_a_pipe_use_the_prefix_cache(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = "--prefix_cache", tmp_path / "cache", "--max_new_tokens", 3
    (tmp_path / "prompts").write_text("abc\nabcd\n")
    assert "3 of 7 tokens" in say("letters0", "--prompts", tmp_path / "prompts", *cache, err=True)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abcd ab")))
    assert "4 of 7 tokens" in say("letters0", "--stream", *cache, err=True)


def test_a_prefix_cache_needs_the_text(say: Say, tmp_path: Path) -> None:
    say("letters0", "--prompt", "abc", "--save_state", tmp_path / "state")
    given = "--state", tmp_path / "state", "--prefix_cache", tmp_path / "cache"
    assert "give one of them" in say("letters0", *given, code=2, err=True)


@pytest.mark.parametrize("draft", ["letters0", "letters1"])
def test_a_draft_changes_the_speed_alone(say: Say, models: Path, draft: str) -> None:
    settings = "--prompt", "abcabc", "--max_new_tokens", 20, "--temperature", 0
    wanted = say("letters1", *settings)
    given = *settings, "--draft", models / draft, "--ahead", 3
    assert say("letters1", *given) == wanted
    told = say("letters1", *given, err=True)
    pattern = r"draft: (\d+) of (\d+) proposed tokens accepted, [\d.]+ tokens per round, \d+ tokens"
    accepted, proposed = map(int, re.match(pattern, told).groups())
    assert accepted <= proposed
    assert draft != "letters1" or (accepted, proposed) == (15, 15)


@pytest.mark.parametrize(
    ("draft", "more", "message"),
    [
        ("numbers", (), "has another tokenizer than"),
        ("letters0", ("--state_dtype", "bfloat16"), "leave out --state_dtype"),
        ("letters0", ("--ahead", 0), "ahead=0"),
        ("letters0", ("--state", "kept"), "kept.draft"),
    ],
)
def test_a_draft_that_cannot_be_is_refused(
    say: Say,
    models: Path,
    draft: str,
    more: tuple[object, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    say("letters1", "--prompt", "ab", "--save_state", "kept")
    given = "--prompt", "abc", "--draft", models / draft, *more
    assert message in say("letters1", *given, code=2, err=True)


def test_a_draft_decodes_no_file_of_prompts(say: Say, models: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("abc\n")
    given = "--prompts", tmp_path / "prompts", "--draft", models / "letters0"
    assert "--draft decodes one text" in say("letters1", *given, code=2, err=True)


def test_a_draft_reads_a_stream_and_what_the_prefix_cache_lacks(
    say: Say, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stream(*given: object, err: bool = False) -> str:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abcabc ab")))
        settings = "--force", "--max_new_tokens", 12, "--temperature", 0
        return say("letters1", "--stream", *settings, *given, err=err)

    wanted, draft = stream(), ("--draft", models / "letters0")
    cache = "--prefix_cache", tmp_path / "cache"
    assert stream(*draft) == wanted
    assert stream(*draft, *cache) == wanted
    assert stream(*draft, *cache) == wanted
    assert "9 of 9 tokens came with a kept state" in stream(*draft, *cache, err=True)


def test_a_text_with_a_draft_is_continued(say: Say, models: Path, tmp_path: Path) -> None:
    file, draft = tmp_path / "tale", ("--draft", models / "letters0", "--temperature", 0)
    wanted = say("letters1", "--prompt", "abcabc", "--max_new_tokens", 20, "--temperature", 0)
    begun = say(
        "letters1", "--prompt", "abcabc", "--max_new_tokens", 9, *draft, "--save_state", file
    )
    rest = say("letters1", "--state", file, "--max_new_tokens", 11, *draft)
    assert begun + rest == wanted
    plain = say("letters1", "--state", file, "--max_new_tokens", 11, "--temperature", 0)
    assert rest == plain
