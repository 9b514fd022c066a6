"""Mistakes of users: each gives one line and exit code 2, and leaves no file."""

import shlex
from collections.abc import Callable

import pytest

Refused = Callable[..., str]

TASK = ["--task", "copying"]
TASKS = ["--tasks", "copying"]

MISTAKES = [
    # Commands and options
    (["trian"], "unknown command 'trian': did you mean 'train'? Known: bench, capacity, "),
    (["info"], "the following arguments are required: patterns"),
    (["train", "h3", "--train.min_lr", "0"], "did you mean 'train.final_share'?"),
    (["info", "h3", "--dmodel", "8"], "unknown option 'dmodel': did you mean 'd_model'?"),
    (["info", "h3", "--d_model", "wide"], "d_model must be int from 1 to 16,777,216, got 'wide'"),
    (
        ["info", "h3", "--norm", "group"],
        "norm must be one of layer, rms, rms_offset, batch, none, got 'group'",
    ),
    (["train", "h3", "--train.steps", "many"], "train.steps must be int of at least 1, got 'many'"),
    (["check", "h3", "--d_model", "1.5"], "d_model must be int, got '1.5'"),
    (["check", "http://localhost:1", "--key", ""], "--key is empty: give a key, or leave it out"),
    (["check", "http://localhost:1", "--length", "9"], "--length is not for servers: give a patt"),
    (
        ["check", "hf:numbers", "--chunks", "2", "3"],
        "--chunks is for layers: give a pattern or the",
    ),
    (
        ["check", "h3", "--state_dtype", "int8", "--chunks", "2", "3"],
        "--chunks has no effect with --state_dtype: leave one out",
    ),
    # Patterns
    (["info", "mamba-13m"], "unknown preset 'mamba-13m': did you mean 'mamba-130m'?"),
    (["info", "atention"], "unknown layer 'atention': did you mean 'attention'?"),
    (["check", "atention"], "unknown layer 'atention': did you mean 'attention'?"),
    (["info", "h3(d_state=4"], "expected ',' or ')' at <here>: h3(d_state=4<here>"),
    (["info", "h3\n)"], "expected a layer name at <here>: h3 <here>)"),
    (["info", "h3(dstate=4)"], "unknown keyword of H3 'dstate': did you mean 'd_state'?"),
    (["info", "h3(init=log)"], "H3 wants init to be one of lin, inv, legs, got 'log'"),
    (["info", "attention(n_heads=3)"], "n_heads must divide d_model, got n_heads=3 and d_model=64"),
    (["info", "ladder"], "ladder wraps other layers: give a pattern, as in ladder(h3*2)"),
    (["info", "h3*99999"], "a repeat count of at most 9999 at <here>: h3*<here>99999"),
    (["info", "ladder(" * 2000], "malformed pattern: expected at most 16 nested parentheses"),
    (
        ["info", "h3", "--d_model", "9" * 20],
        "wants d_model to fit into 64 bits, got a larger number",
    ),
    (["info", "h3", "--d_model", "0"], "wants d_model to be int from 1 to 16,777,216, got 0"),
    (["check", "h3", "--d_model", "-1"], "wants d_model to be int from 1 to 16,777,216, got -1"),
    # Tasks
    (["train", "h3", "--task", "copyng"], "unknown task 'copyng': did you mean 'copying'?"),
    (["train", "h3", "--task", "copying(len=3)"], "unknown keyword of Copying 'len'"),
    (["train", "h3", "--task", "copying(max_len=99)"], "context_len must hold the longest example"),
    (["train", "h3", "--task", "text(path=books)"], "got 'books', which does not exist"),
    (["compare", "h3", "--tasks", "text(path=empty)"], "found no text in empty: give a path"),
    # Training
    (["train", "h3)", *TASK], "expected a layer name at <here>: h3<here>)"),
    (["train", "attention", *TASK, "--model.d_model", "6"], "n_heads must divide d_model"),
    (["train", "h3", *TASK, "--train.steps", "0"], "wants steps to be int of at least 1, got 0"),
    (["train", "h3", *TASK, "--train.lr", "-1"], "wants lr to be a finite number above 0"),
    (["train", "h3", *TASK, "--train.lr", "nan"], "train.lr must be a finite number above 0"),
    (
        ["train", "h3", *TASK, "--train.ssm_lr", "inf"],
        "ssm_lr must be a finite number above 0 or none",
    ),
    (["train", "h3", *TASK, "--train.clip", "-1"], "wants clip to be a finite number of at"),
    (
        ["train", "h3", *TASK, "--train.seed", "9" * 30],
        "wants seed to fit into 64 bits, got a larger number",
    ),
    (
        ["train", "h3", "--task", "copying(batch_size=0)"],
        "wants batch_size to be int of at least 1",
    ),
    (
        ["train", "h3", *TASK, "--device", "tpu"],
        "device must be auto, cpu, cuda, cuda:N, mps or meta, got 'tpu'",
    ),
    (
        ["train", "h3", *TASK, "--train.schedule", "lineer"],
        "train.schedule must be one of constant",
    ),
    (["train", "h3", *TASK, "--out", "file/run"], "cannot write file/run/"),
    (["train", "h3", "--pattern", "lstm"], "--pattern replaces the pattern of a recipe file or of"),
    (["train", "runs/none"], "a YAML file (.yaml, .yml) or an existing folder, got 'runs/none'"),
    (
        ["train", "run", "--init", "numbers"],
        "--init goes with a YAML file, got RECIPE run: give",
    ),
    (["train", "lstm", "--init", "numbers"], "--init goes with a YAML file, got RECIPE lstm"),
    # Comparisons
    (["compare", *TASKS], "the following arguments are required: patterns"),
    (["compare", "h3", "h33", *TASKS], "unknown layer 'h33': did you mean 'h3'?"),
    (["compare", "h3", *TASKS, "copyng"], "unknown task 'copyng': did you mean 'copying'?"),
    (["compare", "h3", *TASKS, "--workers", "-1"], "workers must be at least 0, got workers=-1"),
    (["compare", "h3", *TASKS, "--parameters", "-5"], "parameters must be at least 1, got -5"),
    (["compare", "h3", *TASKS, "--parameters", "9" * 20], "parameters must be at most 100,000,000"),
    (["compare", "h3", *TASKS, "--model.d_model", "8"], "did you mean 'd_model'?"),
    (["compare", "h3", *TASKS, "--train.seed", "8"], "did you mean 'seeds'?"),
    (["compare", "h3", *TASKS, "--out", "file/run"], "cannot write file/run/report.html: "),
    # Generation
    (["generate", "nowhere"], "no model in nowhere: there is no such folder"),
    (["info", "tiny/h3-1m"], "or get it by hf download tiny/h3-1m --local-dir FOLDER"),
    (["generate", "numbers", "--prompt", ""], "the prompt is empty: give at least one token"),
    (["generate", "numbers", "--prompt", "1 10"], "tokens must be from 0 to 9, got 1 to 10"),
    (["generate", "numbers", "--prompt", "-1"], "tokens must be from 0 to 9, got -1 to -1"),
    (["generate", "numbers", "--prompt", "one"], "so text must be token numbers, got 'one'"),
    (["generate", "numbers", "--prompt", "9" * 30], "so text must be token numbers, got '999"),
    (
        ["generate", "numbers", "--prompt", "1", "--top_p", "2"],
        "wants top_p to be a finite number above 0, at most 1 or none",
    ),
    (
        ["generate", "numbers", "--prompt", "1", "--top_p", "nan"],
        "top_p must be a finite number or",
    ),
    (
        ["generate", "numbers", "--prompt", "1", "--min_p", "0"],
        "wants min_p to be a finite number above 0, at most 1 or none, got 0.0",
    ),
    (
        ["generate", "numbers", "--prompt", "1", "--top_k", "0"],
        "wants top_k to be int of at least 1 or none, got 0",
    ),
    (
        ["generate", "numbers", "--prompt", "1", "--temperature", "-1"],
        "wants temperature to be a finite number of at least 0",
    ),
    (["generate", "numbers", "--prompt", "1", "--max_new_tokens", "-1"], "max_new_tokens must not"),
    (["generate", "short", "--prompt", "x" * 22], "made for max_len=20 tokens, got 2"),
    (["generate", "short", "--prompt", "x"], "prompt and new tokens make 256 positions, but the"),
]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_nothing_behind(
    refused: Refused, arguments: list[str], message: str
) -> None:
    assert message in refused(shlex.join(arguments))


RESUME = "train recipe.yaml --out run --resume "


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--train.lr 0.1",
            "other settings: lr (0.004 then, 0.1 now); give the same",
        ),
        ("--train.steps 3", "other settings: steps (4 then, 3 now); give the same, or ch"),
        ("--model.d_model 16", "other settings: d_model (8 then, 16 now); give the same"),
        ("--pattern lstm", "other settings: pattern (h3(d_state=4) then, lstm now); give"),
        ("--task 'tokens(path=corpus, length=16)'", "other settings: "),
        ("--task copying", "other settings: task (text(path=book.txt, length=16, batch_s"),
    ],
)
def test_another_run_does_not_go_on_from_a_checkpoint(
    refused: Refused, options: str, message: str
) -> None:
    assert message in refused(RESUME + options, said="continuing from run/checkpoints")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("data source --out run", "run must be empty or hold a corpus, but has checkpoints: choos"),
        ("train recipe.yaml --out run", "run holds a run: add --resume to continue it, or choose"),
        ("train recipe.yaml --out corpus", "corpus holds something else than a run: choose anothe"),
        ("train recipe.yaml --out short", "short holds something else than a run: choose another"),
        (
            "data source --out corpus --tokenizer character --newlines keep",
            "made with newlines='unify', not 'keep': cho",
        ),
        ("generate run --save-state run", "cannot write run: Is a directory; choose another folde"),
        ("generate run --save-state file/state", "cannot write file/state: Not a directory; choos"),
        ("evaluate run book.txt --out empty", "cannot write empty: Is a directory; choose another"),
        ("evaluate run book.txt --out file/new", "cannot write file/new: Not a directory; choose"),
        ("report run --out file", "cannot write file/report.html: Not a directory; choose another"),
        ("compare h3 --tasks copying --out file", "cannot write file/report.html: Not a directory"),
    ],
)
def test_what_is_in_the_way_stays(refused: Refused, command: str, message: str) -> None:
    assert message in refused(command)
