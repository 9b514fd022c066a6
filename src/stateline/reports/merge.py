"""Merging the results of several runs, for one report."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from stateline.errors import InputError
from stateline.pattern import format_pattern, parse_pattern
from stateline.reports.format import DASH
from stateline.runs.protocol_records import ProtocolRecord, TrialRecord
from stateline.runs.results import FORMAT, Results, RunRecord, SpeedRecord, TaskRecord

_COMPARABLE = ("metric", "higher_is_better", "solved_at", "train_length", "eval_lengths")
"""Fields in which the records of one task on the same data must agree."""


class _Model(NamedTuple):
    """A model of one of the results, or of several that differ only in its seeds."""

    name: str
    folders: list[str]
    runs: list[RunRecord]
    speed: list[SpeedRecord]
    trials: list[TrialRecord]


def merge(results: Mapping[str, Results]) -> Results:
    """Join the results of several runs.

    Tasks with the same spec and the same data are one task. Models with the same name stay apart,
    named after their width or folder, unless they differ only in the seeds: then they are one
    model with several seeds.

    Args:
        results: Results by the name of their folder.

    Returns:
        Results whose ``sources`` describe each folder.

    Raises:
        InputError: If the same task was scored in different ways.
    """
    tasks = _tasks(results)
    models: dict[str, list[_Model]] = {}
    for folder, one in results.items():
        specs = {task.spec: tasks[_key(task)].spec for task in one.tasks}
        for name in one.models:
            runs = [replace(run, task=specs[run.task]) for run in one.runs if run.model == name]
            speed = [entry for entry in one.speed if entry.model == name]
            tried = [replace(t, task=specs[t.task]) for t in one.trials if t.model == name]
            _add(models.setdefault(name, []), _Model(name, [folder], runs, speed, tried))
    named = {name: model for same in models.values() for name, model in _named(same).items()}
    return Results(
        format=FORMAT,
        command="",
        created="",
        finished=all(one.finished for one in results.values()),
        environment={},
        models=list(named),
        tasks=list(tasks.values()),
        runs=[replace(run, model=name) for name, model in named.items() for run in model.runs],
        speed=[replace(e, model=name) for name, model in named.items() for e in model.speed[:1]],
        sources=[replace(one.origins()[0], folder=folder) for folder, one in results.items()],
        protocol=_protocol(list(results.values())),
        trials=[replace(t, model=name) for name, model in named.items() for t in model.trials],
    )


def _protocol(results: Sequence[Results]) -> ProtocolRecord | None:
    """The common protocol of all results; ``None`` if their protocols differ."""
    found = [one.protocol for one in results if one.protocol is not None]
    how = ("matched_by", "match_length", "tolerance")
    fields = ("name", "rungs", "kept", "trial_seed", *how)
    if len(found) < len(results) or len({str([getattr(p, f) for f in fields]) for p in found}) > 1:
        return None
    joined: dict[str, dict[str, Any]] = {}
    for field in ("learning_rates", "muon_rates", "weight_decays", "seeds", "validation"):
        joined[field] = {k: v for one in reversed(found) for k, v in getattr(one, field).items()}
    sizes = sorted({size for one in found for size in one.sizes})
    return replace(found[0], **joined, sizes=sizes, looks=max(one.looks for one in found))


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


def _key(task: TaskRecord) -> tuple[str, str]:
    """Identity of a task: its keywords, however they are spelled, and its data."""
    return format_pattern(parse_pattern(task.spec)), str(task.data.get("sha256", ""))


def _tasks(results: Mapping[str, Results]) -> dict[tuple[str, str], TaskRecord]:
    """Every task once; if a spec was run on different data, the data's hash joins the spec."""
    found: dict[tuple[str, str], TaskRecord] = {}
    for folder, one in results.items():
        for task in one.tasks:
            known = found.setdefault(_key(task), task)
            for field in _COMPARABLE:
                own, first = getattr(task, field), getattr(known, field)
                if own != first:
                    raise InputError(
                        f"the task {task.spec} must have been scored alike in all runs, got "
                        f"{field} {own} in {folder} and {first} before: report it by itself"
                    )
    specs = [spec for spec, _ in found]
    return {
        (spec, data): replace(task, spec=spec if specs.count(spec) == 1 else _on(spec, data))
        for (spec, data), task in found.items()
    }


def _on(spec: str, data: str) -> str:
    return f"{spec} · data {data[:8] or 'unknown'}"


def _add(models: list[_Model], new: _Model) -> None:
    """Add a model, as further seeds of one with the same settings if there is one.

    A model with the same runs, such as a teacher of several students, is there already.
    """
    for model in models:
        if model.runs == new.runs:
            return
        if _settings(model) == _settings(new) and not _seeds(model) & _seeds(new):
            model.folders.extend(new.folders)
            model.runs.extend(new.runs)
            model.speed.extend(new.speed)
            model.trials.extend(new.trials)
            return
    models.append(new)


def _settings(model: _Model) -> set[str]:
    return {json.dumps(run.settings, sort_keys=True) for run in model.runs}


def _seeds(model: _Model) -> set[tuple[str, int]]:
    return {(run.task, run.seed) for run in model.runs}


def _named(models: list[_Model]) -> dict[str, _Model]:
    """Models that share a name, by unique names."""
    if len(models) == 1:
        return {models[0].name: models[0]}
    widths = [_widths(model) if model.runs else "" for model in models]
    return {
        f"{model.name} · {width if width and widths.count(width) == 1 else _home(model)}": model
        for model, width in zip(models, widths, strict=True)
    }


def _widths(model: _Model) -> str:
    widths = sorted({run.d_model for run in model.runs})
    return f"d_model {DASH.join(str(width) for width in dict.fromkeys(widths[:1] + widths[-1:]))}"


def _home(model: _Model) -> str:
    more = f" and {len(model.folders) - 1} more" if len(model.folders) > 1 else ""
    return f"{model.folders[0]}{more}"
