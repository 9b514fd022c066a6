"""Reading ``results.json``: what a report is made of is checked here, once, and nowhere else."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stateline.errors import InputError
from stateline.reports.records import FORMAT, Record

_NUMBER = (int, float)
_OPTIONAL = (int, float, type(None))

_RESULTS: Mapping[str, Any] = {
    "command": str,
    "created": str,
    "finished": bool,
    "environment": dict,
    "models": list,
    "tasks": list,
    "runs": list,
    "speed": list,
}
_TASK: Mapping[str, Any] = {
    **dict.fromkeys(["spec", "name", "title", "about", "metric"], str),
    "higher_is_better": bool,
    "solved_at": _OPTIONAL,
    "train_length": int,
    "eval_lengths": list,
    "data": dict,
    "baselines": dict,
}
_RUN: Mapping[str, Any] = {
    **dict.fromkeys(["model", "task", "stopped"], str),
    **dict.fromkeys(["seed", "d_model", "parameters", "parameters_wanted", "steps"], int),
    **dict.fromkeys(["seconds", "tokens_per_second"], _NUMBER),
    "steps_to_solve": _OPTIONAL,
    "curve": list,
    "by_length": dict,
}
_RUN_EXTRAS: Mapping[str, Any] = {
    **dict.fromkeys(["training", "by_position", "capacity"], dict),
    "sample": str,
}
_CAPACITY: Mapping[str, Any] = {"numbers": int, "needed": (int, type(None)), "by_bits": dict}
_POINT: Mapping[str, Any] = {"step": int, "loss": _OPTIONAL, "metric": _OPTIONAL}
_COSTS = (
    *("train_tokens_per_second", "decode_tokens_per_second"),
    *("state_bytes", "flops_per_token"),
)
_SPEED: Mapping[str, Any] = {
    **dict.fromkeys(["model", "task"], str),
    **dict.fromkeys(["d_model", "parameters"], int),
    **dict.fromkeys(_COSTS, dict),
}
_SPEED_EXTRAS: Mapping[str, Any] = {"longest_copy": (int, type(None))}


class _Damaged(Exception):
    """What is wrong with the content of a file."""


def read_results(folder: Path) -> Record:
    """The results of a comparison or a training run.

    Args:
        folder: Where it was written; holds ``results.json``.

    Raises:
        InputError: If the file is not there, cannot be read, has another format or lacks something.
    """
    path = folder / "results.json"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(results, dict) and results.get("format") not in (None, FORMAT):
            raise InputError(
                f"{path} must have the format {FORMAT!r}, got {results['format']!r}: "
                "report it with the version of stateline that wrote it"
            )
        _check(results)
    except FileNotFoundError as error:
        raise InputError(
            f"no results in {folder}: results.json is missing; give the folder of a comparison or "
            "a training run"
        ) from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give another folder") from error
    except (ValueError, RecursionError, _Damaged) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is damaged: {error}; run its command again") from error
    return results


def _check(results: Any) -> None:
    """Everything that a report looks at is there, and of its kind."""
    _fields("it", results, {"format": str, **_RESULTS})
    _items("models", results["models"], str)
    for task in results["tasks"]:
        _fields("a task", task, _TASK)
        _items("eval_lengths", task["eval_lengths"], int)
        _items("baselines", task["baselines"].values(), _NUMBER)
        if task["train_length"] not in task["eval_lengths"] or min(task["eval_lengths"]) < 1:
            raise _Damaged(f"the lengths of {task['spec']} are {task['eval_lengths']}")
    if not results["models"] or not results["tasks"]:
        raise _Damaged("it names no model or no task")
    tasks = {task["spec"]: task for task in results["tasks"]}
    for run in results["runs"]:
        _run(run, results["models"], tasks)
    for entry in results["speed"]:
        _fields("a speed entry", entry, _SPEED)
        _fields("a speed entry", entry, {n: k for n, k in _SPEED_EXTRAS.items() if n in entry})
        _known("a speed entry", entry["model"], results["models"])
        for field in _COSTS:
            _by_length(field, entry[field], _NUMBER)


def _run(run: Any, models: list[str], tasks: Mapping[str, Record]) -> None:
    _fields("a run", run, _RUN)
    _fields("a run", run, {name: kind for name, kind in _RUN_EXTRAS.items() if name in run})
    _known("a run", run["model"], models)
    _known("a run", run["task"], tasks)
    for point in run["curve"]:
        _fields("a point of a curve", point, _POINT)
    _by_length("by_position", run.get("by_position", {}), _OPTIONAL)
    if "capacity" in run:
        _fields("capacity", run["capacity"], _CAPACITY)
        _by_length("by_bits", run["capacity"]["by_bits"], _NUMBER, least=0)
    task = tasks[run["task"]]
    _fields("by_length", run["by_length"], {str(n): dict for n in task["eval_lengths"]})
    for scores in run["by_length"].values():
        _fields("by_length", scores, {task["metric"]: _OPTIONAL})


def _fields(what: str, record: Any, kinds: Mapping[str, Any]) -> None:
    if not isinstance(record, dict):
        raise _Damaged(f"{what} must be a mapping, got {record!r:.40}")
    for name, kind in kinds.items():
        if name not in record:
            raise _Damaged(f"{what} lacks {name!r}")
        _items(name, [record[name]], kind)


def _items(name: str, values: Any, kind: Any) -> None:
    for value in values:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise _Damaged(f"{name} cannot be {value!r:.40}")


def _known(what: str, name: str, known: Any) -> None:
    if name not in known:
        raise _Damaged(f"{what} is of {name!r}, which is not listed")


def _by_length(name: str, numbers: Mapping[str, Any], kind: Any, least: int = 1) -> None:
    """A mapping from lengths or the like, which are text in JSON, to numbers."""
    _items(name, numbers.values(), kind)
    for length in numbers:
        if not length.isdecimal() or length != str(int(length)) or int(length) < least:
            raise _Damaged(f"{name} has the length {length!r}")
