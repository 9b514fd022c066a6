"""One run: train a model on a task from its start, score it, and keep it with its result."""

import dataclasses
from collections.abc import Callable

from msgspec.structs import replace

from stateline.files import write_text
from stateline.models.factory import AnyModel
from stateline.plugins import imported
from stateline.runs.folder import RESULT
from stateline.runs.job import Job
from stateline.runs.results import CurvePoint, RunRecord, to_json
from stateline.runs.score import needed_bits, sample_text, score_by_length, score_by_position
from stateline.runs.start import Start
from stateline.tasks import Task
from stateline.train.checkpoint import save_whole
from stateline.train.metrics import COMPLETE, Metrics, TrainingDiverged, TrainResult
from stateline.train.processes import Processes


def run_job(
    start: Start,
    on_log: Callable[[Metrics], None],
    *,
    interrupted: Callable[[], bool] = lambda: False,
) -> RunRecord:
    """Train and score one model, or only train it if the job is a trial.

    Args:
        start: From :func:`~stateline.runs.start.begin`. ``result.json`` is written last.
        on_log: Called with every line of metrics.
        interrupted: Called after every update and between final scores; if it returns true, the
            run is saved and stops. Final scores then begin anew.

    Returns:
        The result; if its ``stopped`` is ``interrupted``, it is not stored. A
        trial has no scores but ``validation``; it is ``paused`` after ``job.until`` updates, and
        continues if it is run again.
    """
    ended = _train(start, on_log, interrupted)
    job, task, model = start.job, start.task, start.trainer.model
    folder, processes = start.folder, start.trainer.processes
    good = ended.stopped in COMPLETE and not job.trial
    if good:
        save_whole(model, folder, processes)
    run = _record(job, task, model, ended, processes)
    if good:
        run = _scored(run, task, model, processes, interrupted)
    elif run.stopped != "interrupted" and not job.trial:
        run = replace(run, by_length={length: {task.metric: None} for length in task.eval_lengths})
    if run.stopped != "interrupted" and processes.main:
        write_text(folder / RESULT, to_json(run))
    return run


def _train(
    start: Start, on_log: Callable[[Metrics], None], interrupted: Callable[[], bool]
) -> TrainResult:
    """How the training ended; it may have diverged, and a trial may have paused."""
    job, logged = start.job, 0

    def log(metrics: Metrics) -> None:
        nonlocal logged
        logged = metrics.step
        on_log(metrics)

    def stop() -> bool:
        return interrupted() or (job.until is not None and logged >= job.until)

    try:
        ended = start.trainer.train(log, stop)
    except TrainingDiverged as error:
        return TrainResult(steps=error.steps, stopped=str(error))
    if job.trial and ended.stopped == "interrupted" and not interrupted():
        ended.stopped = "paused"
    return ended


def _record(
    job: Job, task: Task, model: AnyModel, ended: TrainResult, processes: Processes
) -> RunRecord:
    """The record of a run without final scores."""
    last = ended.curve[-1].metric if ended.curve else None
    apart = job.trial or job.training.chooses or task.drawn  # the final scores use other data
    return RunRecord(
        model=job.label,
        family=job.family,
        size=job.size,
        own_size=job.own_size,
        task=job.task,
        seed=job.training.seed,
        d_model=job.model.d_model,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        parameters_wanted=job.parameters_wanted,
        training=dataclasses.asdict(job.training),
        environment={**processes.environment()},
        imports=list(imported()),
        stopped=ended.stopped,
        steps=ended.steps,
        seconds=ended.seconds,
        compile_seconds=ended.compile_seconds,
        tokens_per_second=ended.tokens / ended.seconds if ended.seconds else 0.0,
        steps_to_solve=ended.steps_to_solve,
        curve=[CurvePoint(step=m.step, loss=m.loss, metric=m.metric) for m in ended.curve],
        validation=last if apart else None,
        by_length={},
    )


def scored_as_it_is(
    job: Job,
    task: Task,
    model: AnyModel,
    processes: Processes,
    interrupted: Callable[[], bool] = lambda: False,
) -> RunRecord:
    """The record of a model that is scored without an update, or ``interrupted`` between scores."""
    run = _record(job, task, model, TrainResult(stopped="finished"), processes)
    return _scored(replace(run, training={}), task, model, processes, interrupted)


def _scored(
    run: RunRecord,
    task: Task,
    model: AnyModel,
    processes: Processes,
    interrupted: Callable[[], bool],
) -> RunRecord:
    parts: tuple[Callable[[RunRecord], RunRecord], ...] = (
        lambda run: replace(run, by_length=score_by_length(model, task)),
        lambda run: replace(run, sample=sample_text(model, task)),
        lambda run: replace(run, by_position=score_by_position(model, task)),
        lambda run: replace(run, capacity=needed_bits(model, task, run.by_length)),
    )
    for score in parts:
        if processes.sum(interrupted()):
            return replace(run, stopped="interrupted")
        with processes.scoring(model):
            run = score(run)
    return run
