"""What is refused before a run begins, and what a run that fails leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stateline.cli import main
from stateline.errors import InputError
from stateline.files import sole_writer
from stateline.runs.folder import check_imports, recorded_imports

RECIPE = """
pattern: h3
task: text(path=text.txt, length=8, batch_size=2)
out: run
model: {d_model: 8}
train: {steps: 2}
"""

Refused = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a recipe and its text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(bytes(97 + n % 7 for n in range(400)))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def refused(
    folder: Path, unannotated: None, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Give a command that must fail: its one line. It must neither add, change nor remove files."""

    def run(*command: str) -> str:
        before = contents(folder)
        assert main(list(command)) == 2
        shown = capsys.readouterr()
        assert contents(folder) == before
        (line,) = shown.err.splitlines()
        return line.removeprefix("stateline: error: ")

    return run


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(40))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (BOMB, "must not use YAML aliases"),
        ("pattern: h3\nmodel: " + "{a: " * 40 + "1" + "}" * 40, "at most 16 nested levels"),
        ("pattern: h3\nmodel: " + "[" * 100_000, "at most 16 nested levels"),
        (" " * (1 << 20) + "pattern: h3", "must have at most 1,048,576 bytes"),
        ("pattern: h3\nmodel: {layers: {h3: {1: 3}}}", "names in the recipe bad.yaml must be text"),
        ("pattern: h3\n1: 2", "names in the recipe bad.yaml must be text, got 1"),
        ("pattern: h3\ntask: null", "task in the recipe bad.yaml must be text, got None"),
        ("pattern: h3\nout: null", "out in the recipe bad.yaml must be text, got None"),
        ("pattern: h3\nmodel: null", "model in the recipe bad.yaml must be a mapping"),
        ("pattern: h3\ntrain: {lr: 1}\ntrain: {steps: 2}", "train is given twice in one mapping"),
        ("pattern: h3\ntrain: {lr: 1, steps: 2, lr: 2}", "lr is given twice in one mapping"),
        ("pattern: [\n", "bad.yaml is not valid YAML: while parsing"),
        ("pattern: \x00", "bad.yaml is not valid YAML"),
        ("pattern: h3-99b", "unknown preset 'h3-99b'"),
    ],
    ids=lambda text: text[-24:],
)
def test_a_recipe_that_cannot_be_used_is_one_line(
    refused: Refused, recipe: str, message: str
) -> None:
    Path("bad.yaml").write_text(recipe)
    assert message in refused("train", "bad.yaml")


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_recipe_must_be_a_regular_file(refused: Refused, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    assert "other.yaml: it is a" in refused("train", "other.yaml")


def test_the_pattern_of_a_recipe_may_be_a_preset(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("preset.yaml").write_text("pattern: mamba-130m\nmodel: {d_model: 32}\n")
    assert main(["train", "preset.yaml", "--print_config"]) == 0
    shown = capsys.readouterr().out
    for line in ("pattern: mamba*24", "norm: rms", "d_model: 32"):
        assert line in shown


def test_a_recipe_with_brackets_in_its_name_is_found(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("recipe.yaml").rename("recipe[1].yaml")
    assert main(["train", "recipe[1].yaml", "--print_config"]) == 0
    assert "pattern: h3" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["config.json", "config.yaml", "model.safetensors", "result.json", "results.json"]
)
def test_a_folder_in_place_of_a_file_of_the_run_is_found_before_training(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    Path("run", name).mkdir(parents=True)
    if name in ("config.json", "results.json"):  # else it would not be taken for a run
        Path("run/config.yaml").write_text(RECIPE)

    def train(*_: object, **__: object) -> None:
        raise AssertionError("training has begun")

    monkeypatch.setattr("stateline.runs.start.prepared", train)
    assert f"cannot write run/{name}: Is a directory" in refused("train", "recipe.yaml", "--resume")


@pytest.mark.parametrize("name", ["report.html", "results.json"])
def test_what_a_comparison_cannot_write_is_found_before_training(
    refused: Refused, name: str
) -> None:
    Path("all", name).mkdir(parents=True)
    command = ["compare", "h3", "--tasks", "copying", "--out", "all", "--workers", "0"]
    assert f"cannot write all/{name}" in refused(*command)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory")])
def test_a_run_that_has_no_memory_leaves_nothing(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def forward(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("stateline.train.segment.Segment.forward", forward)
    assert "not enough memory" in refused("train", "recipe.yaml")
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("stays")
    assert "not enough memory" in refused("train", "recipe.yaml", "--out", "mine")


def test_a_run_that_fails_after_a_checkpoint_keeps_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scored(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("stateline.runs.train.score_by_length", scored)
        assert main(["train", "recipe.yaml"]) == 2
    assert Path("run/checkpoints/step-00000002").is_dir()
    assert main(["train", "recipe.yaml", "--resume"]) == 0
    assert json.loads(Path("run/result.json").read_text())["steps"] == 2


def test_a_run_needs_the_code_that_it_was_begun_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names: list[str] = ["/home/me/layers.py", "mine.tasks"]
    for module in ("store", "train", "folder"):
        monkeypatch.setattr(f"stateline.runs.{module}.imported", lambda: tuple(names))
    assert main(["train", "recipe.yaml"]) == 0
    assert recorded_imports(folder / "run") == names
    assert json.loads(Path("run/result.json").read_text())["imports"] == names
    del names[0]
    with pytest.raises(InputError, match=r"your own code: add --import /home/me/layers\.py$"):
        check_imports(folder / "run")
    assert main(["train", "recipe.yaml", "--resume"]) == 2
    assert "add --import /home/me/layers.py" in capsys.readouterr().err


def test_a_pipe_in_place_of_the_imports_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "imports.json")
    with pytest.raises(InputError, match=r"imports\.json: it is a pipe"):
        recorded_imports(tmp_path)


def test_a_run_of_a_layer_that_is_not_imported_says_so_before_the_layer_is_unknown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run").mkdir()
    Path("run/imports.json").write_text('["/home/me/layers.py"]')
    assert main(["train", "my_layer", "--out", "run", "--resume"]) == 2
    assert "your own code: add --import /home/me/layers.py" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{}", "[1]", "{", "[" * 100_000])
def test_a_damaged_list_of_imports_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "imports.json").write_text(text)
    with pytest.raises(InputError, match="remove it") as caught:
        recorded_imports(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def hold(folder: Path) -> subprocess.Popen[str]:
    """A process that writes the folder of a run until it is killed."""
    code = (
        "import sys, time, pathlib\n"
        "from stateline.files import sole_writer\n"
        "with sole_writer(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_run_that_another_process_writes_is_refused_until_that_process_has_died(
    refused: Refused, folder: Path
) -> None:
    assert main(["train", "recipe.yaml"]) == 0
    with hold(folder / "run") as other:
        try:
            more = ("train", "recipe.yaml", "--resume", "--train.steps", "4")
            assert refused(*more).startswith("another process writes run: wait until it has ended")
        finally:
            other.kill()
    assert main([*more]) == 0
    assert json.loads(Path("run/result.json").read_text())["steps"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("sight", ["run", "run/tokenizer.json", "run/metrics.jsonl"])
def test_a_run_killed_before_its_first_checkpoint_starts_again(folder: Path, sight: str) -> None:
    command = [sys.executable, "-m", "stateline", "train", "recipe.yaml", "--train.steps", "100000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not (folder / sight).exists():
            time.sleep(0.002)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert main(["train", "recipe.yaml"]) == 0
    assert main(["train", "recipe.yaml", "--out", "alone"]) == 0
    again, alone = (Path(name, "model.safetensors").read_bytes() for name in ("run", "alone"))
    assert again == alone


def test_two_runs_in_one_process_cannot_write_one_folder(folder: Path) -> None:
    with sole_writer(folder / "run"):
        assert main(["train", "recipe.yaml"]) == 2
    assert main(["train", "recipe.yaml"]) == 0
    assert main(["train", "recipe.yaml", "--resume"]) == 0


def test_the_same_comparison_twice_at_a_time_is_refused(refused: Refused, folder: Path) -> None:
    with hold(folder / "all") as other:
        try:
            command = ["compare", "lstm", "--tasks", "copying", "--out", "all", "--workers", "0"]
            assert "another process writes all" in refused(*command)
        finally:
            other.kill()
