"""Several results side by side, as if they were one: for one report of many runs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stateline.errors import InputError
from stateline.models.pattern import format_pattern, parse_pattern
from stateline.reports.format import DASH
from stateline.reports.records import FORMAT, Record

_COMPARABLE = ("metric", "higher_is_better", "solved_at", "train_length", "eval_lengths")
"""In what the records of one task on the same data must agree."""

_OUTCOME = {
    *("seed", "steps", "stopped", "seconds", "tokens_per_second", "steps_to_solve", "environment"),
    *("curve", "by_length", "by_position", "sample"),
}
"""Fields of a run that may differ between the seeds of one model; all others are its settings."""


class _Model(NamedTuple):
    """A model of one of the results, or the same model from other seeds in several."""

    pattern: str
    folders: list[str]
    runs: list[dict[str, Any]]
    speed: list[Record]


def merge(results: Mapping[str, Record]) -> Record:
    """Join the results of several runs.

    Tasks with the same spec and the same data are one task. Models with the same pattern stay
    apart, and are named after what differs, unless they differ only in the seeds that they were
    trained from: then they are one model with several seeds.

    Args:
        results: Results by the name of their folder.

    Returns:
        Results in the same form, where ``sources`` tells of each folder what was run there.

    Raises:
        InputError: If what should be the same task was scored in different ways.
    """
    tasks = _tasks(results)
    models: dict[str, list[_Model]] = {}
    for folder, record in results.items():
        names = {task["spec"]: tasks[_key(task)]["spec"] for task in record["tasks"]}
        for pattern in record["models"]:
            runs = [
                {**run, "task": names[run["task"]]}
                for run in record["runs"]
                if run["model"] == pattern
            ]
            speed = [entry for entry in record["speed"] if entry["model"] == pattern]
            _add(models.setdefault(pattern, []), _Model(pattern, [folder], runs, speed))
    named = {name: model for same in models.values() for name, model in _named(same).items()}
    return {
        "format": FORMAT,
        "finished": all(record["finished"] for record in results.values()),
        "sources": [{"folder": folder, **_source(record)} for folder, record in results.items()],
        "models": list(named),
        "tasks": list(tasks.values()),
        "runs": [{**run, "model": name} for name, model in named.items() for run in model.runs],
        "speed": [{**e, "model": name} for name, model in named.items() for e in model.speed[:1]],
    }


def folder_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell folders apart.

    Raises:
        InputError: If a folder is given twice.

    Example:
        >>> folder_names([Path("/runs/a/h3"), Path("/runs/b/h3")])
        ['a/h3', 'b/h3']
    """
    parts = [folder.resolve().parts for folder in folders]
    twice = [folder for folder, own in zip(folders, parts, strict=True) if parts.count(own) > 1]
    if twice:
        raise InputError(f"each folder must be given once, got {twice[0]} twice: name it once")
    for depth in range(1, max(map(len, parts)) + 1):
        names = [Path(*own[-depth:]).as_posix() for own in parts]
        if len(set(names)) == len(names):
            break
    return names


def _source(record: Record) -> dict[str, Any]:
    return {name: record[name] for name in ("command", "created", "finished", "environment")}


def _key(task: Record) -> tuple[str, str]:
    """What makes two records the same task: its keywords, however spelled, and its data."""
    return format_pattern(parse_pattern(task["spec"])), str(task["data"].get("sha256", ""))


def _tasks(results: Mapping[str, Record]) -> dict[tuple[str, str], Record]:
    """Every task once; where one was on different data, its hash is part of the spec."""
    found: dict[tuple[str, str], Record] = {}
    for folder, record in results.items():
        for task in record["tasks"]:
            known = found.setdefault(_key(task), task)
            for field in _COMPARABLE:
                if known[field] != task[field]:
                    raise InputError(
                        f"the task {task['spec']} must have been scored alike in all runs, got "
                        f"{field} {task[field]} in {folder} and {known[field]} before: report it "
                        "by itself"
                    )
    specs = [spec for spec, _ in found]
    return {
        (spec, data): {**task, "spec": spec if specs.count(spec) == 1 else _on(spec, data)}
        for (spec, data), task in found.items()
    }


def _on(spec: str, data: str) -> str:
    return f"{spec} · data {data[:8] or 'unknown'}"


def _add(models: list[_Model], new: _Model) -> None:
    """Add a model to those of its pattern: to one that has the same settings, if there is one."""
    for model in models:
        if _settings(model) == _settings(new) and not _seeds(model) & _seeds(new):
            model.folders.extend(new.folders)
            model.runs.extend(new.runs)
            model.speed.extend(new.speed)
            return
    models.append(new)


def _settings(model: _Model) -> set[str]:
    """All that the runs of a model were given, but for the seeds."""
    given = [{k: v for k, v in run.items() if k not in _OUTCOME} for run in model.runs]
    return {
        json.dumps(run | {"training": {**run.get("training", {}), "seed": 0}}, sort_keys=True)
        for run in given
    }


def _seeds(model: _Model) -> set[tuple[str, int]]:
    return {(run["task"], run["seed"]) for run in model.runs}


def _named(models: list[_Model]) -> dict[str, _Model]:
    """Models of one pattern by names of their own."""
    if len(models) == 1:
        return {models[0].pattern: models[0]}
    widths = [_widths(model) if model.runs else "" for model in models]
    return {
        f"{model.pattern} · {width if width and widths.count(width) == 1 else _home(model)}": model
        for model, width in zip(models, widths, strict=True)
    }


def _widths(model: _Model) -> str:
    widths = sorted({run["d_model"] for run in model.runs})
    return f"d_model {DASH.join(str(width) for width in dict.fromkeys(widths[:1] + widths[-1:]))}"


def _home(model: _Model) -> str:
    more = f" and {len(model.folders) - 1} more" if len(model.folders) > 1 else ""
    return f"{model.folders[0]}{more}"
