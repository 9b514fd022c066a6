"""Every mistake a user can make: one line, exit code 2, and nothing left behind."""

from pathlib import Path

import pytest

from stateline.cli import main
from stateline.models.checkpoint import save_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

TASK = ["--task", "copying"]
TASKS = ["--tasks", "copying"]

MISTAKES = [
    # Commands and options
    (["trian"], "unknown command 'trian': did you mean 'train'? Known: check, compare, "),
    (["info"], "the following arguments are required: pattern"),
    (["info", "h3", "--dmodel", "8"], "unrecognized arguments: --dmodel 8"),
    (["info", "h3", "--d_model", "wide"], "d_model must be int, got 'wide'"),
    (["info", "h3", "--norm", "batch"], "norm must be layer or rms, got 'batch'"),
    (["train", "h3", "--train.steps", "many"], "train.steps must be int, got 'many'"),
    (["check", "h3", "--d_model", "1.5"], "d_model must be int, got '1.5'"),
    # Patterns
    (["info", "atention"], "unknown layer 'atention': did you mean 'attention'?"),
    (["check", "atention"], "unknown layer 'atention': did you mean 'attention'?"),
    (["info", "h3(d_state=4"], "expected ',' or ')' at <here>: h3(d_state=4<here>"),
    (["info", "h3\n)"], "expected a layer name at <here>: h3 <here>)"),
    (["info", "h3(dstate=4)"], "unknown keyword of layer 'h3' 'dstate': did you mean 'd_state'?"),
    (["info", "h3(init=log)"], "layer 'h3' wants init to be one of lin, inv, legs, got 'log'"),
    (["info", "attention(n_heads=3)"], "n_heads must divide d_model, got n_heads=3 and d_model=64"),
    (["info", "ladder"], "ladder wraps other layers: give a pattern, as in ladder(h3*2)"),
    (["info", "h3", "--d_model", "0"], "d_model must be at least 1, got 0"),
    (["check", "h3", "--d_model", "-1"], "d_model must be at least 1, got -1"),
    # Tasks
    (["train", "h3", "--task", "copyng"], "unknown task 'copyng': did you mean 'copying'?"),
    (["train", "h3", "--task", "copying(len=3)"], "unknown keyword of task 'copying' 'len'"),
    (["train", "h3", "--task", "copying(max_len=99)"], "context_len must hold the longest example"),
    (["train", "h3", "--task", "text(path=books)"], "got 'books', which does not exist"),
    (["compare", "h3", "--tasks", "text(path=empty)"], "found no text in empty: give a path"),
    # Training
    (["train", "h3)", *TASK], "expected a layer name at <here>: h3<here>)"),
    (["train", "attention", *TASK, "--model.d_model", "6"], "n_heads must divide d_model"),
    (["train", "h3", *TASK, "--train.steps", "0"], "steps must be at least 1, got 0"),
    (["train", "h3", *TASK, "--train.lr", "-1"], "lr must be positive"),
    (["train", "h3", *TASK, "--train.schedule", "lineer"], "train.schedule must be constant or "),
    (["train", "h3", *TASK, "--out", "file/run"], "cannot write file/run/config.yaml: "),
    # Comparisons
    (["compare", *TASKS], "the following arguments are required: patterns"),
    (["compare", "h3", "h33", *TASKS], "unknown layer 'h33': did you mean 'h3'?"),
    (["compare", "h3", *TASKS, "copyng"], "unknown task 'copyng': did you mean 'copying'?"),
    (["compare", "h3", *TASKS, "--workers", "0"], "workers must be at least 1, got 0"),
    (["compare", "h3", *TASKS, "--parameters", "-5"], "parameters must be at least 1, got -5"),
    (["compare", "h3", *TASKS, "--out", "file/run"], "cannot write file/run/results.json: "),
    # Generation
    (["generate", "nowhere"], "no model in nowhere: config.json is missing"),
    (["generate", "damaged"], "the model in damaged is damaged: "),
    (["generate", "model", "--prompt", ""], "the prompt is empty: give at least one token"),
    (["generate", "model", "--prompt", "1 10"], "tokens must be from 0 to 9, got 1 to 10"),
    (["generate", "model", "--prompt", "-1"], "tokens must be from 0 to 9, got -1 to -1"),
    (["generate", "model", "--prompt", "one"], "give the prompt as token numbers, got 'one'"),
    (["generate", "model", "--prompt", "9" * 30], "give the prompt as token numbers, got '999"),
    (["generate", "model", "--prompt", "1", "--top_p", "2"], "top_p must be above 0 and at most 1"),
    (["generate", "model", "--prompt", "1", "--top_k", "0"], "top_k must be at least 1, got 0"),
    (["generate", "model", "--prompt", "1", "--temperature", "-1"], "temperature must not be neg"),
    (["generate", "model", "--prompt", "1", "--max_new_tokens", "-1"], "max_new_tokens must not"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a damaged model, an empty folder and a file."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "empty").mkdir()
    (folder / "file").write_text("")
    for name in ("model", "damaged"):
        save_model(LanguageModel(ModelConfig("h3", vocab_size=10, d_model=8)), folder / name)
    weights = folder / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    return folder


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_nothing_behind(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("stateline: error: ")
    assert message in lines[0]
    assert sorted(folder.rglob("*")) == before
