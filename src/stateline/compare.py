"""Compare architectures: train each at the same size on each task, score it, then time it."""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from stateline.bench.speed import decode_tokens_per_second, train_tokens_per_second
from stateline.errors import InputError
from stateline.evaluate import evaluate
from stateline.files import write_text
from stateline.models.checkpoint import save_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.models.pattern import format_pattern, parse_pattern
from stateline.models.size import count_parameters, match_width, meta_model
from stateline.tasks import CorpusTask, Task, make_task
from stateline.train.config import TrainConfig
from stateline.train.loop import Metrics, TrainingDiverged, train
from stateline.train.run import environment

FORMAT = "stateline-results-1"

EVAL_BATCHES = 16
"""Batches of fresh problems behind each final score of a generated task."""

SPEED_LENGTHS = (256, 1024)
"""Tokens in a training row; tokens in the state when decoding is timed."""

STATE_LENGTHS = (256, 1024, 4096, 16384, 65536)
"""Tokens after which the state is weighed, and lengths at which operations are counted."""

Results = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """What to compare.

    Attributes:
        patterns: Architectures.
        tasks: Tasks, in the grammar of patterns: ``copying(max_len=20)``. A repeat count is a
            number of seeds: ``associative_recall*3``.
        d_model: Width of the first pattern, whose number of parameters the others match.
        parameters: Number of parameters to match instead.
        steps: Training steps; by default what suits the task.
        learning_rate: By default what suits the task.
    """

    patterns: Sequence[str]
    tasks: Sequence[str]
    d_model: int = 64
    parameters: int | None = None
    steps: int | None = None
    learning_rate: float | None = None


@dataclass(frozen=True)
class Job:
    """One model to be trained on one task from one seed.

    Attributes:
        task: The task, with its keywords.
        parameters_wanted: What the width was chosen by.
        model: What is trained.
        training: How; also has the seed.
        data: Hash of the task's data, where it has any: a run on other data is another run.
    """

    task: str
    parameters_wanted: int
    model: ModelConfig
    training: TrainConfig
    data: str = ""

    @property
    def name(self) -> str:
        """Folder name: legible, and different for whatever differs."""
        return f"{_slug(self.task)}--{_slug(self.model.pattern)}--{_digest(self)}"


class News:
    """What a comparison tells while it runs; override what is of interest."""

    def planned(self, jobs: Sequence[Job], done: int) -> None:
        """All jobs are known, and so many were done before."""

    def progress(self, job: Job, metrics: Metrics) -> None:
        """A job has trained a little further."""

    def finished(self, job: Job, run: Results) -> None:
        """A job is done."""

    def timing(self, pattern: str) -> None:
        """The speed of a model is being measured."""


def compare(
    comparison: Comparison,
    folder: Path,
    *,
    command: str,
    workers: int | None = None,
    news: News | None = None,
) -> Results:
    """Run a comparison, or what is left of it.

    Each run has its own folder below ``folder / "runs"``; one whose result lies there is not run
    again. Training runs share the cores, one thread each or more; speed is measured alone and last.

    Args:
        comparison: What to compare.
        folder: Where everything is written.
        command: How a person starts the same comparison, for the record.
        workers: Training runs at a time; by default one per core.
        news: Told what happens.

    Returns:
        The content of ``folder / "results.json"``, which is also brought up to date after each run.

    Raises:
        InputError: If a pattern, task or setting cannot be used (before anything is written), or
            the folder cannot be written to.
    """
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    news = news or News()
    jobs = plan(comparison)
    results = _outline(jobs, command)
    finished = {job: run for job in jobs if (run := _stored(folder / "runs" / job.name))}

    def record() -> None:
        results["runs"] = [finished[job] for job in jobs if job in finished]
        _write(folder, results)

    record()  # a folder that cannot be written to shows now
    news.planned(jobs, len(finished))
    pending = [job for job in jobs if job not in finished]
    for job, run in _train_all(pending, folder, workers or _cores(), news):
        finished[job] = run
        record()
        news.finished(job, run)
    for job in _jobs_to_time(jobs):
        news.timing(job.model.pattern)
        results["speed"].append(_speed(job, folder))
        _write(folder, results)
    results["finished"] = True
    _write(folder, results)
    return results


def plan(comparison: Comparison) -> list[Job]:
    """All training runs, each at its width.

    Raises:
        InputError: If a pattern, task or setting cannot be used.
    """
    if not comparison.patterns or not comparison.tasks:
        raise InputError("a comparison needs at least one pattern and one task")
    if comparison.parameters is not None and comparison.parameters < 1:
        raise InputError(f"parameters must be at least 1, got {comparison.parameters}")
    patterns = [format_pattern(parse_pattern(pattern)) for pattern in comparison.patterns]
    jobs = []
    for spec, seeds in map(_seeds, comparison.tasks):
        task = make_task(spec)
        models = [ModelConfig(pattern, task.vocab_size) for pattern in patterns]
        wanted = comparison.parameters
        if wanted is None:
            yardstick = dataclasses.replace(models[0], d_model=comparison.d_model)
            wanted = count_parameters(yardstick)
            models[0] = yardstick
        sized = [m if wanted == count_parameters(m) else match_width(m, wanted) for m in models]
        data = str(task.describe().get("sha256", ""))
        for model in sized:
            jobs += [
                Job(spec, wanted, model, _training(comparison, task, seed), data)
                for seed in range(seeds)
            ]
    return list(dict.fromkeys(jobs))


def _seeds(task: str) -> tuple[str, int]:
    """A task without its repeat count, which is a number of seeds."""
    items = parse_pattern(task)
    return format_pattern((items[0]._replace(repeat=1), *items[1:])), items[0].repeat


def _training(comparison: Comparison, task: Task, seed: int) -> TrainConfig:
    settings: dict[str, Any] = {**task.training, "seed": seed}
    if comparison.steps is not None:
        settings["steps"] = comparison.steps
    if comparison.learning_rate is not None:
        settings["learning_rate"] = comparison.learning_rate
    return TrainConfig(**settings)


def run_job(job: Job, folder: Path, on_log: Callable[[Metrics], None]) -> Results:
    """Train and score one model; its files appear in ``folder``, the result last."""
    task = make_task(job.task, seed=job.training.seed)
    torch.manual_seed(job.training.seed)
    model = LanguageModel(job.model)
    run: Results = {
        "model": job.model.pattern,
        "task": job.task,
        "seed": job.training.seed,
        "d_model": job.model.d_model,
        "parameters": count_parameters(job.model),
        "parameters_wanted": job.parameters_wanted,
    }
    try:
        result = train(model, task, job.training, log_file=folder / "metrics.jsonl", on_log=on_log)
    except TrainingDiverged as error:
        scores = {str(length): {task.metric: None} for length in task.eval_lengths}
        run |= {"stopped": str(error), "steps": error.steps, "seconds": 0.0, "curve": []}
        run |= {"tokens_per_second": 0.0, "steps_to_solve": None, "by_length": scores}
    else:
        batches = 0 if isinstance(task, CorpusTask) else EVAL_BATCHES
        run |= {
            "stopped": result.stopped,
            "steps": result.steps,
            "seconds": result.seconds,
            "tokens_per_second": result.tokens / result.seconds,
            "steps_to_solve": result.steps_to_solve,
            "curve": [{"step": m.step, "loss": m.loss, "metric": m.metric} for m in result.curve],
            "by_length": {
                str(length): evaluate(model, task, length, batches=batches)
                for length in task.eval_lengths
            },
        }
        save_model(model, folder)
    run["training"] = dataclasses.asdict(job.training)
    write_text(folder / "result.json", json.dumps(run))
    return run


def _train_all(
    jobs: Sequence[Job], folder: Path, workers: int, news: News
) -> Iterator[tuple[Job, Results]]:
    """Run jobs in processes of their own, and yield each with its result when it is done."""
    if not jobs:
        return
    workers = min(workers, len(jobs))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    pool = ProcessPoolExecutor(
        workers, context, initializer=_start_worker, initargs=(queue, max(1, _cores() // workers))
    )
    running: dict[Future[Results], Job] = {
        pool.submit(_work, job, folder / "runs" / job.name): job for job in jobs
    }
    try:
        while running:
            done, _ = wait(running, timeout=0.2, return_when="FIRST_COMPLETED")
            for job, metrics in _drain(queue):
                news.progress(job, metrics)
            for future in done:
                yield running.pop(future), future.result()
    except BrokenProcessPool as error:
        raise InputError(
            "a training process was killed, perhaps for want of memory: the same command resumes, "
            "and with --workers 1 needs less"
        ) from error
    finally:  # nothing is left to do, or nobody waits for it any more
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()


_news: Any = None
"""In a worker: the queue to its parent."""


def _start_worker(queue: Any, threads: int) -> None:
    global _news
    _news = queue
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers itself
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would go on, and at last wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(job: Job, folder: Path) -> Results:
    return run_job(job, folder, lambda metrics: _news.put((job, metrics)))


def _drain(queue: Any) -> Iterator[tuple[Job, Metrics]]:
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            return


def _jobs_to_time(jobs: Sequence[Job]) -> list[Job]:
    """One job per pattern, of the first task on text if there is one, else of the first task."""
    specs = dict.fromkeys(job.task for job in jobs)
    task = next((s for s in specs if isinstance(make_task(s), CorpusTask)), jobs[0].task)
    return [job for job in jobs if job.task == task and job.training.seed == 0]


def _speed(job: Job, folder: Path) -> Results:
    """Speed, state size and operations of one model, measured now or before."""
    path = folder / "speed" / f"{_slug(job.model.pattern)}--{_digest(job.model)}"
    if stored := _stored(path):
        return stored
    torch.manual_seed(0)
    model, counted = LanguageModel(job.model), meta_model(job.model)
    entry = {
        "model": job.model.pattern,
        "task": job.task,
        "d_model": job.model.d_model,
        "parameters": count_parameters(job.model),
        "train_tokens_per_second": {n: train_tokens_per_second(model, n) for n in SPEED_LENGTHS},
        "decode_tokens_per_second": {n: decode_tokens_per_second(model, n) for n in SPEED_LENGTHS},
        "state_bytes": {n: counted.state_bytes(n) for n in STATE_LENGTHS},
        "flops_per_token": {n: counted.flops_per_token(n) for n in STATE_LENGTHS},
    }
    write_text(path / "result.json", json.dumps(entry))
    return json.loads(json.dumps(entry))  # keys as text, as in the file


def _outline(jobs: Sequence[Job], command: str) -> Results:
    """Results without any run."""
    specs = dict.fromkeys(job.task for job in jobs)
    return {
        "format": FORMAT,
        "command": command,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "finished": False,
        "environment": environment(),
        "models": list(dict.fromkeys(job.model.pattern for job in jobs)),
        "tasks": [_describe(spec, make_task(spec)) for spec in specs],
        "runs": [],
        "speed": [],
    }


def _describe(spec: str, task: Task) -> Results:
    return {
        "spec": spec,
        "name": parse_pattern(spec)[0].name,
        "title": task.title,
        "about": task.about,
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "solved_at": task.solved_at,
        "train_length": task.train_length,
        "eval_lengths": list(task.eval_lengths),
        "data": task.describe(),
        "baselines": task.baselines() if isinstance(task, CorpusTask) else {},
    }


def _write(folder: Path, results: Mapping[str, Any]) -> None:
    write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")


def _stored(folder: Path) -> Results | None:
    """Result of an earlier run, if it is there and whole."""
    try:
        return json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _cores() -> int:
    """Processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _digest(value: Job | ModelConfig) -> str:
    text = json.dumps(dataclasses.asdict(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:60]
