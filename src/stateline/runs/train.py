"""One run: build a model, train it on a task, score it, and keep it with its result."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stateline.data.tokenizer import FILE
from stateline.files import write_text
from stateline.generate import load_run
from stateline.models.checkpoint import save_model
from stateline.models.factory import AnyModel, make_model
from stateline.models.size import count_parameters
from stateline.plugins import imported
from stateline.runs.extras import needed_bits, sample_text
from stateline.runs.folder import RESULT
from stateline.runs.job import Job, check_job
from stateline.runs.results import CurvePoint, RunRecord, to_json
from stateline.runs.score import diverged_scores, score_by_length, score_by_position
from stateline.runs.store import nothing_half_made, prepare_run
from stateline.tasks import Task, make_task
from stateline.train.checkpoint import whole_weights
from stateline.train.folder import found
from stateline.train.loop import ALONE, train
from stateline.train.metrics import Metrics, TrainingDiverged, TrainResult
from stateline.train.processes import Processes


def run_job(
    job: Job,
    folder: Path,
    on_log: Callable[[Metrics], None],
    *,
    task: Task | None = None,
    processes: Processes = ALONE,
    interrupted: Callable[[], bool] = lambda: False,
) -> RunRecord:
    """Train and score one model, or only train it if the job is a trial.

    Args:
        job: What to train.
        folder: Folder of the run; an unfinished run in it is continued. ``result.json`` is
            written last.
        on_log: Called with every line of metrics.
        task: The job's task, constructed with the job's seed; by default it is constructed here.
        processes: The processes that share the work, and their device; each calls this function.
        interrupted: Called after every update; if it returns true, the run is saved and stops.

    Returns:
        The result; if its ``stopped`` is ``interrupted``, it has no scores and is not stored. A
        trial has no scores but ``validation``; it is ``paused`` after ``job.until`` updates, and
        continues if it is run again.

    Raises:
        InputError: If the job cannot be run, or the folder cannot be written to.
    """
    if task is None:
        task = make_task(job.task, seed=job.training.seed)
    if job.trial:
        task.hold_out_validation()
    check_job(job, task)
    with nothing_half_made(folder) if processes.main else nullcontext():
        processes.on_main(lambda: prepare_run(folder))
        torch.manual_seed(job.training.seed)
        model = _initial_model(job, fresh=not found(folder)).to(processes.device)
        outcome = _outcome(job, task, model, folder, processes, on_log, interrupted)
    run = _record(job, processes, outcome)
    if processes.main and run.stopped != "interrupted":
        write_text(folder / RESULT, to_json(run))
    return run


def _initial_model(job: Job, *, fresh: bool) -> AnyModel:
    if job.init and fresh:
        return load_run(job.init, dtype=torch.float32)[0]
    return make_model(job.model)


def _outcome(
    job: Job,
    task: Any,
    model: AnyModel,
    folder: Path,
    processes: Processes,
    on_log: Callable[[Metrics], None],
    interrupted: Callable[[], bool],
) -> dict[str, Any]:
    """Train, score and save a model, and return the fields of its record that this determines."""
    logged = 0

    def log(metrics: Metrics) -> None:
        nonlocal logged
        logged = metrics.step
        on_log(metrics)

    def stop() -> bool:
        return interrupted() or (job.until is not None and logged >= job.until)

    if task.has_text and not found(folder):  # a run that continues has its own
        processes.on_main(partial(task.tokenizer.save, folder / FILE))
    try:
        result = train(
            model,
            task,
            job.training,
            folder=folder,
            run={"task": job.task, "model": dataclasses.asdict(job.model), "data": job.data},
            processes=processes,
            on_log=log,
            interrupted=stop,
        )
    except TrainingDiverged as error:
        return _diverged(error, job, task)
    if job.trial and result.stopped == "interrupted" and not interrupted():
        result.stopped = "paused"
    outcome = _trained(result, job, task)
    if job.trial or result.stopped == "interrupted":
        return outcome
    outcome |= _scored(model, task)
    weights = whole_weights(model)
    if processes.main:
        save_model(model, folder, weights=weights)
    return outcome


def _record(job: Job, processes: Processes, outcome: dict[str, Any]) -> RunRecord:
    return RunRecord(
        model=job.label,
        family=job.family,
        size=job.size,
        own_size=job.own_size,
        task=job.task,
        seed=job.training.seed,
        d_model=job.model.d_model,
        parameters=count_parameters(job.model),
        parameters_wanted=job.parameters_wanted,
        training=dataclasses.asdict(job.training),
        environment={**processes.environment()},
        imports=list(imported()),
        **{"by_length": {}} | outcome,
    )


def _trained(result: TrainResult, job: Job, task: Task) -> dict[str, Any]:
    scores = [m.metric for m in result.curve if m.metric is not None]
    apart = job.trial or task.drawn
    return {
        "stopped": result.stopped,
        "steps": result.steps,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens / result.seconds if result.seconds else 0.0,
        "steps_to_solve": result.steps_to_solve,
        "curve": [CurvePoint(step=m.step, loss=m.loss, metric=m.metric) for m in result.curve],
        "validation": scores[-1] if scores and apart else None,
    }


def _diverged(error: TrainingDiverged, job: Job, task: Task) -> dict[str, Any]:
    return {
        "stopped": str(error),
        "steps": error.steps,
        "seconds": 0.0,
        "tokens_per_second": 0.0,
        "steps_to_solve": None,
        "curve": [],
        "by_length": {} if job.trial else diverged_scores(task),
    }


def _scored(model: AnyModel, task: Task) -> dict[str, Any]:
    by_length = score_by_length(model, task)
    return {
        "by_length": by_length,
        "sample": sample_text(model, task),
        "by_position": score_by_position(model, task),
        "capacity": needed_bits(model, task, by_length),
    }
