"""``stateline evaluate``: what it prints, what it writes, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stateline.cli import main
from stateline.data import ByteTokenizer
from stateline.evaluate import score_file
from stateline.models.checkpoint import load_model, save_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

pytestmark = pytest.mark.usefixtures("unannotated")

Say = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose tokens are bytes, and texts."""
    folder = tmp_path_factory.mktemp("evaluate")
    for name, pattern, max_len in (
        ("h3", "h3(d_state=8)", None),
        ("attention", "attention", None),
        ("short", "h3(d_state=8)", 100),
    ):
        torch.manual_seed(0)
        save_model(LanguageModel(ModelConfig(pattern, 256, 8, max_len=max_len)), folder / name)
    (folder / "a").write_text("A state is a value. " * 120)
    (folder / "b").write_text("né" * 50)
    (folder / "one").write_text("1")
    return folder


@pytest.fixture
def say(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    monkeypatch.chdir(folder)

    def said(*arguments: object, code: int = 0) -> str:
        capsys.readouterr()
        assert main(["evaluate", *map(str, arguments)]) == code
        shown = capsys.readouterr()
        return shown.err if code else shown.out

    return said


def test_an_infinite_perplexity_is_null_in_json(say: Say, tmp_path: Path) -> None:
    out, text = tmp_path / "scores.json", tmp_path / "word"
    text.write_text("a" * 1000)
    assert "inf" in say("h3", text, "--out", out)
    assert json.loads(out.read_text(), parse_constant=pytest.fail)["all"]["word_perplexity"] is None


@pytest.mark.parametrize(
    ("model", "options", "window", "told"),
    [
        ("h3", ["--chunk", 64], None, "read in chunks of 64 tokens, with carried state"),
        (
            "h3",
            ["--window", 32, "--stride", 8],
            32,
            "read in windows of 32 tokens that overlap by 24",
        ),
        (
            "attention",
            [],
            2048,
            "read in windows of 2,048 tokens that overlap by 1,024, each",
        ),
        ("attention", ["--window", 0], None, "read in chunks of 1,024 tokens, with carried state"),
        (
            "short",
            [],
            100,
            "read in windows of 100 tokens that overlap by 50, each from",
        ),
    ],
)
def test_the_scores_are_those_of_the_library(
    say: Say, tmp_path: Path, model: str, options: list[object], window: int | None, told: str
) -> None:
    out = tmp_path / "new" / "scores.json"
    shown = say(model, "a", "b", *options, "--out", out)
    record = json.loads(out.read_text())
    assert told in shown
    assert record["window"] == window
    stride = 8 if window == 32 else None
    for path in ("a", "b"):
        found = record["files"][path]
        wanted = score_file(load_model(model), ByteTokenizer(), path, window=window, stride=stride)
        assert found["bits_per_byte"] == pytest.approx(wanted.bits_per_byte, 1e-5)
        assert found["perplexity"] == pytest.approx(wanted.perplexity, 1e-5)
        assert found["tokens"] == found["bytes"] == Path(path).stat().st_size - 1
        places = {str(end): pytest.approx(m, 1e-5) for end, m in wanted.losses.means().items()}
        assert found["nats_per_token_by_position"] == places
        assert f"{found['bits_per_byte']:.4f}" in shown
    both = record["files"].values()
    assert record["all"]["tokens"] == sum(found["tokens"] for found in both)
    nats = sum(found["nats_per_token"] * found["tokens"] for found in both)
    assert record["all"]["nats_per_token"] * record["all"]["tokens"] == pytest.approx(nats)


def test_losses_are_shown_by_position(say: Say) -> None:
    rows = [line.split() for line in say("h3", "a").splitlines()]
    counts = {row[0]: row[1] for row in rows if row and row[0][0].isdigit()}
    assert counts == {
        **{"1-64": "64", "65-128": "64", "129-256": "128", "257-512": "256"},
        **{"513-1,024": "512", "1,025-2,048": "1,024", "2,049-4,096": "351"},
    }
    shown = say("h3", "a", "--window", "64")
    rows = [line.split() for line in shown.splitlines()]
    assert [row[:2] for row in rows if row and row[0][0].isdigit()] == [["1-64", "2,399"]]
    assert "in window" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["h3"], "give either text files, --task or --tasks to score the model on"),
        (["nowhere", "a"], "no model in nowhere: there is no such folder"),
        (["h3", "c"], "cannot read the text c: No such file or directory; give a"),
        (["h3", "h3"], "cannot read the text h3: it is a folder; give a regular file"),
        (["h3", "one"], "a text to score must have at least two tokens: give a longer one"),
        (["h3", "a", "--chunk", "0"], "chunk and window must be from 1 to 2147483647, and stride"),
        (["h3", "a", "--window", "4", "--stride", "5"], "window=4 and stride=5"),
        (["h3", "a", "--stride", "5"], "--stride is for windows, but the state of this model is"),
        (["h3", "a", "--rows", "2"], "--rows is for --tasks, not for text files"),
        (["h3", "--task", "copying", "--tokenizer", "a"], "is for text files, --tasks, not for"),
        (["h3", "a", "--window", "9", "--chunk", "8"], "--chunk is for carried state, but windows"),
        (["short", "a", "--window", "0"], "made for max_len=100 tokens, got 1023"),
        (["h3", "a", "--out", "a/scores.json"], "cannot write a/scores.json: "),
    ],
)
def test_a_mistake_is_one_line(say: Say, arguments: list[str], message: str) -> None:
    (line,) = say(*arguments, code=2).splitlines()
    assert line.startswith("stateline: error: ")
    assert message in line
