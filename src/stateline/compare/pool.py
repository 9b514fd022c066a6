"""Training runs in worker processes, several at a time, or in this process, one after the other."""

import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Empty
from types import ModuleType
from typing import Any

import torch

from stateline.allocator import keep_freed_memory
from stateline.compare.news import News
from stateline.compare.own_code import OwnCode, own_code
from stateline.devices import resolve_device
from stateline.errors import InputError
from stateline.runs.job import Job
from stateline.runs.results import RunRecord
from stateline.runs.train import run_job
from stateline.tasks import Task
from stateline.train.metrics import Metrics
from stateline.train.processes import Processes
from stateline.workers import cores, serve_parent


def worker_devices(device: str, workers: int | None) -> list[str]:
    """The device of each worker: GPUs in turn if there are several, else the same for all.

    Args:
        device: A device by name; ``cuda`` without a number stands for all GPUs.
        workers: Number of workers; by default one per core, or on GPUs one per GPU.

    Raises:
        InputError: If the device cannot be used, or the number of workers is negative.
    """
    if workers is not None and workers < 0:
        raise InputError(f"workers must be at least 0, got {workers}")
    resolved = resolve_device(device)
    if resolved.type == "meta":
        raise InputError("a model cannot be trained on the device meta, which holds no values")
    places = [str(resolved)]
    if resolved.type == "cuda" and resolved.index is None:
        places = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if workers is None:
        workers = cores() if resolved.type == "cpu" else len(places)
    return [places[index % len(places)] for index in range(workers)]


def train_here(
    jobs: Sequence[Job], folder: Path, device: torch.device, tasks: dict[str, Task], news: News
) -> Iterator[tuple[Job, RunRecord]]:
    """Run jobs in this process, on one thread, and yield each with its result."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same bits as in a worker
    try:
        for job in jobs:
            run = run_job(
                job,
                folder / "runs" / job.name,
                partial(news.progress, job),
                task=tasks.get(job.task) if job.training.seed == 0 else None,
                processes=Processes(device=device),
            )
            yield job, run
    finally:
        torch.set_num_threads(threads)


def train_in_workers(
    jobs: Sequence[Job], folder: Path, devices: Sequence[str], news: News
) -> Iterator[tuple[Job, RunRecord]]:
    """Run jobs in worker processes, one per device, and yield each with its result when it is done.

    Raises:
        InputError: If a worker is killed, or cannot start.
    """
    if not jobs:
        return
    devices = devices[: len(jobs)]
    code = own_code()
    context = multiprocessing.get_context("spawn")
    queue, places, started = context.Queue(), context.Queue(), context.Event()
    for device in devices:
        places.put(device)
    pool = ProcessPoolExecutor(
        len(devices), context, initializer=_start, initargs=(queue, places, started, code)
    )
    others = multiprocessing.active_children()
    news.starting(len(devices))
    with _without_main(keep=code.main):
        running: dict[Future[RunRecord], Job] = {
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
        raise InputError(_broken(started.is_set(), code)) from error
    finally:  # all jobs are done, or the caller has stopped
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()


def _broken(started: bool, code: OwnCode) -> str:
    if started:
        return (
            "a training process was killed, perhaps because memory ran out: the same command "
            "resumes, and --workers 1 needs less memory"
        )
    if code.main:
        return (
            "the worker processes could not import the main script, which defines a layer or a "
            'task: put the call of compare() under if __name__ == "__main__":, move the class to a '
            "file of its own, or use workers=0"
        )
    return "the worker processes could not start: use workers=0 (in Python) to train in this one"


@contextmanager
def _without_main(keep: bool) -> Iterator[None]:
    """Start processes that do not import the main module: it may lack a guard, or be no file."""
    main = sys.modules["__main__"]
    if not keep:
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


_here = Processes()
"""In a worker: the device that it computes on."""

_news: Any = None
"""In a worker: the queue to its parent."""


def _start(queue: Any, places: Any, started: Any, code: OwnCode) -> None:
    global _here, _news
    started.set()
    serve_parent()
    keep_freed_memory()
    torch.set_num_threads(1)  # the same bits for any number of workers
    _here, _news = Processes(device=torch.device(places.get())), queue
    code.restore()


def _work(job: Job, folder: Path) -> RunRecord:
    return run_job(job, folder, lambda metrics: _news.put((job, metrics)), processes=_here)


def _drain(queue: Any) -> Iterator[tuple[Job, Metrics]]:
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            return
