"""Training runs in processes of their own, as many at a time as there are cores."""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from stateline.compare.jobs import Job
from stateline.compare.run import Results, run_job
from stateline.errors import InputError
from stateline.train.metrics import Metrics
from stateline.workers import serve_parent


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


def train_all(
    jobs: Sequence[Job], folder: Path, workers: int, news: News
) -> Iterator[tuple[Job, Results]]:
    """Run jobs in processes of their own, and yield each with its result when it is done."""
    if not jobs:
        return
    workers = min(workers, len(jobs))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(queue,))
    others = multiprocessing.active_children()
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
            if process not in others:
                process.terminate()


_news: Any = None
"""In a worker: the queue to its parent."""


def _start_worker(queue: Any) -> None:
    global _news
    _news = queue
    torch.set_num_threads(1)  # whatever the number of workers, the same bits
    serve_parent()


def _work(job: Job, folder: Path) -> Results:
    return run_job(job, folder, lambda metrics: _news.put((job, metrics)))


def _drain(queue: Any) -> Iterator[tuple[Job, Metrics]]:
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            return
