"""What a run starts from: its task, its model, and its newest checkpoint, made before it trains."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stateline.data.tokenizer import FILE
from stateline.models.factory import AnyModel, make_model
from stateline.runs.initial import start_from
from stateline.runs.job import Job
from stateline.runs.store import record_imports, writing
from stateline.tasks import Task, make_task
from stateline.train.folder import found
from stateline.train.loop import ALONE, Trainer, prepared
from stateline.train.processes import Processes


@dataclass(frozen=True)
class Start:
    """A job that is ready to be trained.

    Attributes:
        job: What is trained.
        folder: Folder of the run; this process may write it.
        task: Gives the final scores.
        trainer: The model, on its device, with the task that it learns, from its newest checkpoint.
    """

    job: Job
    folder: Path
    task: Task
    trainer: Trainer


@contextmanager
def begin(
    job: Job,
    folder: Path,
    *,
    task: Task | None = None,
    processes: Processes = ALONE,
    check: Callable[[], object] = lambda: None,
) -> Iterator[Start]:
    """Make what a job starts from; inside the ``with`` block, no other process writes its folder.

    If the block fails before there is a checkpoint or a result, new files are removed.

    Args:
        job: What to train: a job that :func:`~stateline.runs.job.check_job` accepts.
        folder: Folder of the run; an unfinished run in it is continued.
        task: The job's task, constructed with the job's seed; by default it is constructed here.
        processes: The processes that share the work, and their device; each calls this function.
        check: Called in the main process before anything is made.

    Raises:
        InputError: If the folder cannot be written to, another process writes it, or its checkpoint
            cannot be used.
    """
    with writing(folder, processes):
        processes.on_main(check)
        task = task or make_task(job.task, seed=job.training.seed)
        learned, fresh = _learned(job, task), not found(folder)
        model = _model(job, learned, processes.device, fresh=fresh)
        processes.on_main(lambda: _note(task, folder, fresh=fresh))
        with prepared(
            model, learned, job.training, folder=folder, run=_identity(job), processes=processes
        ) as trainer:
            yield Start(job, folder, task, trainer)


def _learned(job: Job, task: Task) -> Task:
    """The task that is learned; final scores are of data that have chosen nothing."""
    if not job.trial and not job.training.chooses:
        return task
    learned = task if job.trial else make_task(job.task, seed=job.training.seed)
    learned.hold_out_validation()
    return learned


def _model(job: Job, learned: Task, device: torch.device, *, fresh: bool) -> AnyModel:
    """The model before its first update; a checkpoint of the run replaces all its weights."""
    seed, own = job.training.seed, job.training.init_seed
    torch.manual_seed(seed if own is None else own)
    if job.init and fresh:
        return start_from(job.model, job.init, learned, device)
    return make_model(job.model).to(device)


def _note(task: Any, folder: Path, *, fresh: bool) -> None:
    """Store what makes a run's model usable: the names of the user's code, and the tokenizer."""
    record_imports(folder)
    if task.has_text and fresh:
        task.tokenizer.save(folder / FILE)


def _identity(job: Job) -> dict[str, Any]:
    """What defines the run besides its training, as plain data."""
    identity = {"task": job.task, "model": dataclasses.asdict(job.model), "data": job.data}
    return identity | ({"teacher": job.teacher} if job.teacher else {})
