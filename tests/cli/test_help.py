"""Help and version, in a process of their own, to check that PyTorch is not imported."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from stateline import __main__
from stateline.cli import COMMANDS

ANSWER = """
import contextlib, io, json, sys
from stateline.cli import main
def answer(line):
    with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.redirect_stderr(told):
        try:
            code = main(line.split())
        except SystemExit as end:
            code = end.code
    return code, told.getvalue(), "torch" in sys.modules
print(json.dumps({line: answer(line) for line in json.loads(sys.argv[1])}))
"""


MISSING = (
    "generate nowhere --prompt a",
    "evaluate nowhere a.txt",
    "convert nowhere out",
    "serve nowhere",
)
"""Commands on a folder that does not exist."""


@pytest.fixture(scope="module")
def answers() -> dict[str, list[object]]:
    """For each command line: the exit code, what was printed, and whether PyTorch was imported."""
    lines = [
        "",
        "-h",
        "--help",
        "--version",
        "--completion",
        *(f"{command} --help" for command in COMMANDS),
        *MISSING,
    ]
    done = subprocess.run(
        [sys.executable, "-c", ANSWER, json.dumps(lines)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "80"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_on_a_command_needs_no_torch(
    command: str, answers: dict[str, tuple[int, str, bool]]
) -> None:
    code, told, torch = answers[f"{command} --help"]
    assert told.startswith(f"usage: stateline {command} ")
    assert (code, torch) == (0, False)


@pytest.mark.parametrize("line", MISSING)
def test_a_folder_that_does_not_exist_is_told_of_before_torch_is_imported(
    line: str, answers: dict[str, tuple[int, str, bool]]
) -> None:
    code, told, torch = answers[line]
    assert "no model in nowhere: there is no such folder here" in told
    assert (code, torch) == (2, False)


@pytest.mark.parametrize(
    ("command", "option", "said"),
    [
        ("bench", "--processor_time", "for ops, layers, train on a CPU: time of this process"),
        ("compare", "--decide [DECIDE]", "add seeds, from 3 to 6 or --seeds"),
        ("compare", "--budget_minutes BUDGET_MINUTES", "time after which --decide adds no seeds"),
        ("compare", "--budget LIMIT [LIMIT ...]", '"state<=64KiB"'),
        ("compare", "--watch", "open the page in a browser"),
        ("compare", "--threads THREADS", "threads of each model on the CPU"),
        ("compare", "--workers_per_gpu WORKERS_PER_GPU", "models that share a GPU"),
        ("compare", "--engine {local,ray,slurm}", "or by Slurm"),
        ("compare", "--slurm NAME=VALUE [NAME=VALUE ...]", "parameters of submitit"),
        ("compare", "--gpus_per_job GPUS_PER_JOB", "by default 1 if a node has a GPU"),
        ("compare", "--tracker TRACKER", "wandb, mlflow, or MODULE:FUNCTION"),
        ("train", "--tracker TRACKER", "wandb, mlflow, or MODULE:FUNCTION"),
        ("train", "--threads THREADS", "by default all cores"),
        ("report", "--budget LIMIT [LIMIT ...]", '"state<=64KiB"'),
        ("compare", "--seeds SEEDS", "how many seeds"),
        ("reproduce", "--seeds SEEDS [SEEDS ...]", "numbers of the seeds"),
        ("reproduce", "--recipes RECIPES", "by default Stateline's own"),
    ],
)
def test_help_explains_an_option(
    command: str, option: str, said: str, answers: dict[str, tuple[int, str, bool]]
) -> None:
    _, told, _ = answers[f"{command} --help"]
    _, _, explained = " ".join(told.split()).rpartition(f" {option} ")
    assert said in explained[:400]


@pytest.mark.parametrize(("command", "argument"), [("check", "names"), ("evaluate", "files")])
def test_help_does_not_require_what_may_be_left_out(
    command: str, argument: str, answers: dict[str, tuple[int, str, bool]]
) -> None:
    _, told, _ = answers[f"{command} --help"]
    arguments, _, _ = told.partition("\noptions:\n")
    assert "(required" not in arguments.rpartition(f"\n  {argument} ")[2]


@pytest.mark.parametrize(
    ("command", "ends"),
    [
        ("generate", "as saved (one of float32, bfloat16, float16, float64)"),
        ("generate", "likeliest tokens (integer)"),
        ("info", "output matrix. (default: true)"),
        ("info", "are shown (integer, default: 256 1024 4096 16384 65536)"),
    ],
)
def test_help_names_types_and_defaults_in_words(
    command: str, ends: str, answers: dict[str, tuple[int, str, bool]]
) -> None:
    assert ends in " ".join(answers[f"{command} --help"][1].split())


def test_help_has_no_words_of_python(answers: dict[str, tuple[int, str, bool]]) -> None:
    told = " ".join(answers[line][1] for line in answers if "help" in line)
    python = ("Literal", "Optional", "int |", "float |", "(type:", "null", "[]", "``")
    left_over = ("CONFIG", "--parts+")  # of jsonargparse
    assert not [word for word in python + left_over if word in told]


def test_help_leaves_out_settings_that_a_comparison_refuses(
    answers: dict[str, tuple[int, str, bool]],
) -> None:
    told = answers["compare --help"][1]
    assert "--model.block " in told
    assert "--model.d_model" not in told
    assert "--train.seed" not in told


def test_help_is_no_wider_than_a_terminal(answers: dict[str, tuple[int, str, bool]]) -> None:
    lines = [line for asked in answers if "help" in asked for line in answers[asked][1].split("\n")]
    assert max(map(len, lines)) <= 80


def test_help_names_every_command(answers: dict[str, tuple[int, str, bool]]) -> None:
    _, told, torch = answers["--help"]
    assert all(f"  {name:<10}{text}\n" in told for name, text in COMMANDS.items())
    assert not torch


def test_help_comes_where_nothing_is_asked(answers: dict[str, object]) -> None:
    assert answers[""] == answers["-h"] == answers["--help"]


def test_the_package_is_the_command_and_has_its_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stateline", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"stateline {metadata.version('stateline')}\n"


def test_tab_completes_commands_and_options(answers: dict[str, tuple[int, str, bool]]) -> None:
    code, script, torch = answers["--completion"]
    assert (code, torch) == (0, False)

    def completed(*words: str) -> list[str]:
        line = " ".join(words)
        ask = f"{script}\nCOMP_WORDS=({line}) COMP_CWORD={len(words) - 1}\n"
        ask += f"_stateline stateline {words[-1]}\necho ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert completed("stateline", "comp") == ["compare"]
    assert completed("stateline", "compare", "--thr") == ["--threads"]
    assert completed("stateline", "train", "--train.st") == ["--train.steps", "--train.stop_at"]
    assert completed("stateline", "train", "lstm") == []


def test_threads_that_wait_sleep_before_pytorch_loads() -> None:
    """OpenMP reads the policy when it is loaded, and workers inherit it."""
    code = "import os, sys; sys.argv = ['stateline', '--version']; from stateline.cli import main; "
    code += "main(); print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"

    def told(**own: str) -> str:
        without = {name: text for name, text in os.environ.items() if name != "OMP_WAIT_POLICY"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=without | own
        )
        return done.stdout.splitlines()[-1]

    assert told() == "PASSIVE False"
    assert told(OMP_WAIT_POLICY="ACTIVE") == "ACTIVE False"


FIRST = """
import os, sys
class End:
    def find_spec(self, name, *_):
        if name == "torch":
            os._exit(0)  # what was not flushed is lost
sys.meta_path.insert(0, End())
from stateline.cli import main
for line in sys.argv[1:]:
    if not os.fork():
        main(line.split())
    os.wait()
"""


def test_commands_that_train_say_so_before_pytorch_loads() -> None:
    lines = ["compare lstm h3*2", "train h3*2", "train h3*2 --dry_run", "reproduce h3/table_2"]
    done = subprocess.run(
        [sys.executable, "-c", FIRST, *lines], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "comparing lstm, h3*2: results go to runs/compare",
        "training h3*2",
        "reproducing h3/table_2 with the seeds 0, 1, 2: results go to runs/papers",
    ]


def test_without_the_packages_of_the_commands_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(__main__, "find_spec", lambda name: None if name != "rich" else object())
    assert __main__.main() == 2
    said = "the commands need jsonargparse, altair: pip install 'stateline[cli]'"
    assert capsys.readouterr().err == f"stateline: error: {said}\n"


def test_the_extra_of_the_commands_holds_what_they_need() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = {re.split(r"\W", line)[0] for line in project["optional-dependencies"]["cli"]}
    assert extra == set(__main__.NEEDED)


def test_layers_and_training_need_no_package_of_the_commands() -> None:
    code = "import sys; sys.modules.update(dict.fromkeys(('jsonargparse', 'rich', 'altair')))\n"
    code += "import stateline, stateline.compare, stateline.evaluate, stateline.generate\n"
    code += "import stateline.train.loop; [getattr(stateline, name) for name in stateline.__all__]"
    subprocess.run([sys.executable, "-c", code], check=True)
