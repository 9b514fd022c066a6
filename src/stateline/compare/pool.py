"""The local engine: worker processes, or this process, where jobs run one after the other."""

import logging
import multiprocessing
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from logging.handlers import QueueHandler
from pathlib import Path
from queue import Empty
from types import ModuleType
from typing import Any

import torch

from stateline.allocator import keep_freed_memory
from stateline.bench.timing import use_threads
from stateline.compare.engine import Running
from stateline.compare.news import News
from stateline.compare.own_code import OwnCode, own_code
from stateline.devices import resolve_device
from stateline.errors import InputError
from stateline.runs.job import Job
from stateline.runs.results import RunRecord
from stateline.runs.start import begin
from stateline.runs.train import run_job
from stateline.settings import at_least
from stateline.tasks import Task
from stateline.train.metrics import Metrics
from stateline.train.processes import Processes
from stateline.workers import cores, serve_parent, wait_passively


def local(
    device: str = "auto", workers: int | None = None, *, threads: int = 1, workers_per_gpu: int = 1
) -> "Local":
    """The engine of this machine: several GPUs get workers in turn.

    Args:
        device: A device by name; ``cuda`` without a number stands for all GPUs.
        workers: Number of workers, 0 for this process alone; by default the number of cores divided
            by ``threads``, or ``workers_per_gpu`` for each GPU.
        threads: Threads of a worker.
        workers_per_gpu: Workers that share a GPU.

    Raises:
        InputError: If the device cannot be used, or a number is out of range.
    """
    at_least(0, workers=workers)
    at_least(1, threads=threads, workers_per_gpu=workers_per_gpu)
    here = resolve_device(device)
    if here.type == "meta":
        raise InputError("a model cannot be trained on the device meta, which holds no values")
    return Local(_devices(here, workers, threads, workers_per_gpu), here, threads)


def _devices(here: torch.device, workers: int | None, threads: int, per_gpu: int) -> list[str]:
    """The device of each worker."""
    places = [str(here)]
    if here.type == "cuda" and here.index is None:
        places = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if workers is None:
        workers = max(1, cores() // threads) if here.type == "cpu" else len(places) * per_gpu
    return [places[index % len(places)] for index in range(workers)]


class Local:
    """Trains in worker processes, one per device, or without any in this process.

    Args:
        devices: Device of each worker; without any, jobs run in this process.
        here: Device of this process.
        threads: Threads of a job on the CPU. With several, the last bits of its results may differ.
    """

    def __init__(self, devices: Sequence[str], here: torch.device, threads: int = 1) -> None:
        self.devices, self.here, self.threads = devices, here, threads

    @contextmanager
    def open(self, folder: Path, tasks: Mapping[str, Task], news: News) -> Iterator[Running]:
        """See :meth:`Engine.open`."""
        if self.devices:
            workers = _Workers(folder, self.devices, news, self.threads)
            try:
                yield workers
            except BrokenProcessPool as error:  # where a result is taken, or a job is submitted
                raise InputError(_broken(workers.started.is_set(), workers.code)) from error
            finally:
                workers.close()
        else:
            with use_threads(self.threads):  # the same bits as in a worker
                yield _InThisProcess(folder, self.here, tasks, news)


class _InThisProcess:
    """Runs one job after the other."""

    def __init__(
        self, folder: Path, device: torch.device, tasks: Mapping[str, Task], news: News
    ) -> None:
        self.folder, self.device, self.tasks, self.news = folder, device, tasks, news
        self.waiting = deque[Job]()

    def submit(self, jobs: Sequence[Job]) -> None:
        self.waiting.extend(jobs)

    def finished(self) -> Iterator[tuple[Job, RunRecord]]:
        while self.waiting:
            job = self.waiting.popleft()
            folder, processes = self.folder / "runs" / job.name, Processes(device=self.device)
            task = self.tasks.get(job.task) if job.training.seed == 0 else None
            with begin(job, folder, task=task, processes=processes) as start:
                run = run_job(start, partial(self.news.progress, job))
            yield job, run


class _Workers:
    """A pool of processes that starts with the first job and stays until it is closed."""

    def __init__(self, folder: Path, devices: Sequence[str], news: News, threads: int) -> None:
        self.folder, self.devices, self.news, self.threads = folder, devices, news, threads
        self.running = dict[Future[RunRecord], Job]()
        self.logged = set[str]()
        self.pool: ProcessPoolExecutor | None = None

    def submit(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        if self.pool is None:
            self._start(min(len(jobs), len(self.devices)))
        assert self.pool is not None
        with _without_main(keep=self.code.main):  # a pool starts processes as jobs come
            for job in jobs:
                future = self.pool.submit(_work, job, self.folder / "runs" / job.name)
                self.running[future] = job

    def _start(self, workers: int) -> None:
        self.code, self.others = own_code(), multiprocessing.active_children()
        context = multiprocessing.get_context("spawn")
        self.queue, places, self.started = context.Queue(), context.Queue(), context.Event()
        for device in self.devices:
            places.put(device)
        initargs = (self.queue, places, self.started, self.code, self.threads)
        wait_passively()
        self.pool = ProcessPoolExecutor(
            len(self.devices), context, initializer=_start, initargs=initargs
        )
        self.news.starting(workers)

    def finished(self) -> Iterator[tuple[Job, RunRecord]]:
        while self.running:
            done, _ = wait(self.running, timeout=0.2, return_when="FIRST_COMPLETED")
            for told in _drain(self.queue):
                self._pass_on(told)
            for future in done:
                yield self.running.pop(future), future.result()

    def _pass_on(self, told: tuple[Job, Metrics] | logging.LogRecord) -> None:
        """Report a job's progress, or log a worker's message: once, since all workers send it."""
        if not isinstance(told, logging.LogRecord):
            self.news.progress(*told)
        elif told.msg not in self.logged:
            self.logged.add(told.msg)
            log = logging.getLogger(told.name)
            if log.isEnabledFor(told.levelno):
                log.handle(told)

    def close(self) -> None:
        """End all processes, also in the middle of a job."""
        if self.pool is None:
            return
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            if process not in self.others:
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
    return (
        "the worker processes could not start: train in this one, with --workers 0 (workers=0 in "
        "Python)"
    )


@contextmanager
def _without_main(keep: bool) -> Iterator[None]:
    """Start processes that do not import the main module, which may lack a guard or be no file."""
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


def _start(queue: Any, places: Any, started: Any, code: OwnCode, threads: int) -> None:
    global _here, _news
    started.set()
    serve_parent()
    keep_freed_memory()
    torch.set_num_threads(threads)  # the same bits for any number of workers
    _here, _news = Processes(device=torch.device(places.get())), queue
    log = logging.getLogger("stateline")
    log.setLevel(logging.INFO)
    log.addHandler(QueueHandler(queue))  # for the parent, which knows what to show
    code.restore()


def _work(job: Job, folder: Path) -> RunRecord:
    with begin(job, folder, processes=_here) as start:
        return run_job(start, lambda metrics: _news.put((job, metrics)))


def _drain(queue: Any) -> Iterator[tuple[Job, Metrics] | logging.LogRecord]:
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            return
