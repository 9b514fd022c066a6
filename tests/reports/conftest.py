from types import SimpleNamespace
from typing import Any

import pytest

MODELS = ["attention(position=rope)*2", "h3*2", "lstm*2"]

SCORES = {
    "string_accuracy": {"10": 1.0, "20": 0.9, "40": 0.5},
    "bits_per_byte": {"256": 2.5, "1024": 2.25},
}

Results = dict[str, Any]


def task(**changes: Any) -> Results:
    return {
        "spec": "copying(max_len=10)",
        "name": "copying",
        "title": "Copying",
        "about": "Tells whether the model looks back; not whether it could learn to.",
        "metric": "string_accuracy",
        "higher_is_better": True,
        "solved_at": 0.95,
        "train_length": 10,
        "eval_lengths": [10, 20, 40],
        "data": {},
        "baselines": {},
    } | changes


def text_task(**changes: Any) -> Results:
    own = {
        "spec": "text(path=books)",
        "name": "text",
        "title": "Text",
        "metric": "bits_per_byte",
        "higher_is_better": False,
        "solved_at": None,
        "train_length": 256,
        "eval_lengths": [256, 1024],
        "data": {"sha256": "9f2c", "files": 12345, "held_out_files": ["a.txt", "b.txt"]},
        "baselines": {"gzip": 2.9, "xz": 2.7},
    }
    return task(**own | changes)


def run(model: str, of: Results, scores: dict[str, float], **changes: Any) -> Results:
    """A run whose metric at each length is given; it solves its task after 700 steps, if at all."""
    end = scores[str(of["train_length"])]
    solved = of["solved_at"] is not None and end >= of["solved_at"]
    return {
        "model": model,
        "task": of["spec"],
        "seed": 0,
        "d_model": 64,
        "parameters": 120_000,
        "parameters_wanted": 120_000,
        "steps": 700 if solved else 1600,
        "stopped": "solved" if solved else "finished",
        "seconds": 31.2,
        "tokens_per_second": 21_000.0,
        "steps_to_solve": 700 if solved else None,
        "curve": [
            {"step": 50, "loss": 2.1, "metric": None},
            {"step": 100, "loss": 1.1, "metric": end / 2},
            {"step": 700, "loss": 0.1, "metric": end},
        ],
        "by_length": {length: {of["metric"]: score} for length, score in scores.items()},
    } | changes


def speed(model: str, **changes: Any) -> Results:
    return {
        "model": model,
        "task": "text(path=books)",
        "d_model": 64,
        "parameters": 120_000,
        "train_tokens_per_second": {"256": 51_000.0, "1024": 40_000.0},
        "decode_tokens_per_second": {"256": 310.0, "1024": 290.0},
        "state_bytes": {"256": 131_072, "1024": 524_288},
        "flops_per_token": {"256": 300_000, "1024": 420_000},
    } | changes


def results(**changes: Any) -> Results:
    """Three models on copying and text, one seed each, all solved."""
    tasks = [task(), text_task()]
    return {
        "format": "stateline-results-1",
        "command": "stateline compare 'h3*2' --tasks 'copying(max_len=10)'",
        "created": "2026-11-21T08:00:00+00:00",
        "finished": True,
        "environment": {"stateline": "0.1.0", "torch": "2.13.0+cpu", "threads": 2},
        "models": MODELS,
        "tasks": tasks,
        "runs": [run(model, of, SCORES[of["metric"]]) for model in MODELS for of in tasks],
        "speed": [speed(model) for model in MODELS],
    } | changes


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """Builders of results, tasks, runs and speed entries; keywords replace fields."""
    return SimpleNamespace(
        results=results,
        task=task,
        text_task=text_task,
        run=run,
        speed=speed,
        models=MODELS,
        scores=SCORES,
    )
