"""One model on one task by itself, as ``stateline train`` runs it."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stateline.errors import InputError
from stateline.files import check_writable, read_yaml, write_text
from stateline.generate.runs import weights_hash
from stateline.models.size import count_parameters
from stateline.runs.folder import RESULTS
from stateline.runs.initial import as_in_folder, check_tokenizer, start_in_words
from stateline.runs.job import Job, check_job
from stateline.runs.results import RunRecord
from stateline.runs.start import begin
from stateline.runs.store import write_single
from stateline.runs.train import run_job
from stateline.tasks import Task
from stateline.train.config import TrainConfig
from stateline.train.folder import found
from stateline.train.loop import ALONE
from stateline.train.metrics import COMPLETE, Metrics
from stateline.train.processes import Processes
from stateline.train.teacher import teacher_hash

CONFIG = "config.yaml"
"""Name of the file that keeps the recipe of a run."""


def single_job(
    task: Task,
    spec: str,
    pattern: str,
    *,
    model: Mapping[str, Any] | None = None,
    training: TrainConfig | None = None,
    init: str = "",
) -> Job:
    """The job of one model on one task.

    Args:
        task: The task.
        spec: Its text, such as ``"copying(max_len=15)"``.
        pattern: The layers of the model.
        model: Further settings of its configuration.
        training: How it is trained; by default as suits the task.
        init: Folder of a model whose weights the run starts from.

    Raises:
        InputError: If the model cannot be trained on the task.
    """
    config = task.model_config(pattern, model or {})
    if init:
        config = as_in_folder(config, init)
    settings: dict[str, Any] = {**task.training}
    training = training or TrainConfig(**settings)
    job = Job(
        spec,
        count_parameters(config),
        config,
        training,
        str(task.describe().get("sha256", "")),
        teacher=teacher_hash(training.teacher),
        init=init,
        metric=task.metric,
    )
    check_job(job, task)
    if init:
        check_tokenizer(task, init)
    return job


def run_single(  # noqa: PLR0913
    job: Job,
    folder: Path | str,
    *,
    task: Task,
    resume: bool = False,
    recipe: str = "",
    command: str = "",
    processes: Processes = ALONE,
    on_log: Callable[[Metrics], None] = lambda _: None,
    interrupted: Callable[[], bool] = lambda: False,
    tell: Callable[[str], object] = lambda _: None,
) -> RunRecord:
    """Train and score one model, and write its folder with results like a comparison's.

    Args:
        job: What to train, from :func:`single_job`.
        folder: Folder of the run.
        task: The job's task, with seed 0.
        resume: Continue the run in the folder, also for more steps; without it, a folder that
            holds a run is refused.
        recipe: How to train the model again, in YAML, kept as ``config.yaml``.
        command: The command that repeats the run, for the record.
        processes: The processes that share the work; each calls this function.
        on_log: Called with every line of metrics.
        interrupted: Called after every update and between final scores; if it returns true, the
            run is saved and stops.
        tell: Called with lines that tell what begins or continues.

    Returns:
        The result; if its ``stopped`` is ``interrupted``, it is not stored.

    Raises:
        InputError: If the folder holds something else, or cannot be written to, or another process
            writes it.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from stateline.tasks import make_task
        >>> task = make_task("word_problem(batch_size=2)")
        >>> training = TrainConfig(steps=2, warmup_steps=0)
        >>> job = single_job(task, "word_problem(batch_size=2)", "lstm", training=training)
        >>> with TemporaryDirectory() as folder:
        ...     run_single(job, folder, task=task).stopped
        'finished'
    """
    folder = Path(folder)
    own = task if job.training.seed == 0 else None

    def check() -> None:
        _begin(job, folder, recipe, resume, tell)
        tell(f"training {job.model.pattern} on {job.task} in {folder}")

    with begin(job, folder, task=own, processes=processes, check=check) as start:
        run = run_job(start, on_log, interrupted=interrupted)
        if processes.main:
            write_text(folder / CONFIG, recipe)  # a resumed run may have another number of steps
        if processes.main and run.stopped in COMPLETE:
            write_single(job, task, run, folder, command)
    return run


def _begin(
    job: Job, folder: Path, recipe: str, resume: bool, tell: Callable[[str], object]
) -> None:
    """Begin a run's folder, or check that its run can continue."""
    kept = found(folder)
    of_others = (RESULTS, "config.json", "index.json")  # of a comparison, a model and a corpus
    begun = kept or any((folder / name).exists() for name in of_others)
    if begun and not (folder / CONFIG).exists():
        raise InputError(f"{folder} holds something else than a run: choose another with --out")
    if begun and not resume:
        raise InputError(
            f"{folder} holds a run: add --resume to continue it, or choose another with --out"
        )
    if kept:
        _check_init(job, folder)
    for name in (CONFIG, RESULTS):
        check_writable(folder / name)
    if not kept:
        write_text(folder / CONFIG, recipe)
        if resume:
            tell(f"no checkpoint in {folder}: training from the beginning")
        if job.init:
            tell(start_in_words(job.model, job.init))
        return
    tell(f"continuing from {kept[-1]}")


def _check_init(job: Job, folder: Path) -> None:
    """Raise InputError if the run in a folder starts from another model than a job."""
    kept = read_yaml(folder / CONFIG, "recipe of the run")
    before = str(kept.get("init") or "") if isinstance(kept, dict) else job.init
    if not _same_start(before, job.init):
        words = [
            f"the weights in {init}" if init else "random weights" for init in (before, job.init)
        ]
        raise InputError(
            f"the run in {folder} starts from {words[0]}, not from {words[1]}: give the same, or "
            "choose another folder with --out"
        )


def _same_start(before: str, now: str) -> bool:
    """Whether two folders hold the same weights; a folder that is gone may have been moved."""
    if not before or not now:
        return before == now
    gone = not os.path.exists(before)
    return gone or os.path.samefile(before, now) or weights_hash(before) == weights_hash(now)
