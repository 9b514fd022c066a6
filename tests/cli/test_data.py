import json
import shlex
import sys
from pathlib import Path

import pytest

from stateline.cli import main
from stateline.data import open_corpus
from stateline.pattern import Item, parse_pattern


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of ten short documents, one with a byte order mark and Windows' line ends."""
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.txt").write_text(f"document {number} " * 9, encoding="utf-8")
    (folder / "3.txt").write_bytes("\ufeffline\r\nline\r\n".encode())
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["data", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def test_the_command_says_what_is_in_the_corpus(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    shown = said(capsys, str(source), "--out", out, "--workers", "1")
    corpus = open_corpus(out)
    for name, split in corpus.splits.items():
        assert f"{name}: {len(split.names)} documents, {len(split.text):,} tokens, " in shown
    assert "1.000 bytes per token" in shown
    assert "vocabulary 256, newlines: unify" in shown
    assert f"stateline train h3 --task 'tokens(path={out})'\n" in shown


@pytest.mark.parametrize("out", ["my corpus", "1e5", "true", "it's-a,b", "a=(b)*2", "$HOME"])
def test_the_command_that_is_told_names_the_corpus(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(source.parent)
    shown = said(capsys, str(source), "--out", out, "--workers", "1")
    *_, option, task = shlex.split(shown.splitlines()[-1].partition(f"{out}: ")[2])
    assert option == "--task"
    assert parse_pattern(task) == (Item("tokens", {"path": out}),)


def test_options_reach_the_recipe(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "splits.json").write_text(json.dumps({"train": ["3.txt"], "valid": ["4.txt"]}))
    options = ["--tokenizer", "character", "--newlines", "keep", "--shard_tokens", "7"]
    options += ["--splits", str(tmp_path / "splits.json"), "--workers", "1"]
    shown = said(capsys, str(source), "--out", str(tmp_path / "out"), *options)
    corpus = open_corpus(tmp_path / "out")
    assert corpus.tokenizer.decode(corpus.splits["train"].text.read(0, 6)) == "\ufeffline\r"
    assert "documents in no split: 8" in shown


def test_a_task_is_trained_on_the_corpus(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    said(capsys, str(source), "--out", str(out), "--tokenizer", "character", "--workers", "1")
    task = f"tokens(path={out}, length=16, batch_size=2)"
    run = ["train", "h3", "--task", task, "--out", str(tmp_path / "run"), "--model.d_model", "8"]
    assert main([*run, "--train.steps", "2"]) == 0
    assert "bits_per_byte" in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [True, False])
def test_a_second_call_has_nothing_to_do(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1") if terminal else None
    arguments = [str(source), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert "0 of 2 shards, 0 tokens" in said(capsys, *arguments) or terminal
    assert "2 of 2 shards" in said(capsys, *arguments)


MISTAKES = [
    (["--out", "out"], "the following arguments are required: sources"),
    (["source"], "the following arguments are required: out"),
    (["nowhere", "--out", "out"], "cannot read the source "),
    (["empty", "--out", "out"], "found no text in "),
    (["source", "--out", "out", "--held_out", "2"], "held_out must be from 0 to less than 1, got"),
    (["source", "--out", "out", "--newlines", "crlf"], "newlines must be one of unify, keep, got"),
    (
        ["source", "--out", "out", "--tokenizer", "bytes"],
        "there is no tokenizer bytes: give 'byte'",
    ),
    (["source", "--out", "out", "--splits", "nowhere"], "cannot read the file of splits nowhere: "),
    (["source", "--out", "out", "--splits", "#s"], "cannot read the file of splits #s: "),
    (["source", "--out", "out", "--workers", "0"], "workers must be at least 1, got 0"),
    (["source", "--out", "source/out"], "source/out must not be inside the source source"),
    (["source", "--out", "file/out"], "cannot write file/out/unfinished.json: "),
]


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_nothing_behind(
    source: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(source.parent)
    Path("empty").mkdir()
    Path("file").write_text("")
    before = sorted(Path().rglob("*"))
    assert main(["data", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("stateline: error: ")
    assert message in lines[0]
    assert sorted(Path().rglob("*")) == before


def test_a_missing_package_is_one_line(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    arguments = [str(source), "--out", str(tmp_path / "out"), "--tokenizer", str(tmp_path)]
    assert main(["data", *arguments]) == 2
    assert "pip install 'stateline[hf]'" in capsys.readouterr().err


def test_the_share_that_is_really_held_out_is_told(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shown = said(capsys, str(source), "--out", str(out), "--held_out", "0.01", "--workers", "1")
    sizes = {name: int(split.bytes.sum()) for name, split in open_corpus(out).splits.items()}
    share = sizes["held_out"] / sum(sizes.values())
    assert share > 0.01  # a whole document, though a hundredth was wanted
    assert f"held out: {share:.1%} of the bytes (wanted 1.0%;" in shown
