"""The engine ``slurm``: each job is a job of Slurm, submitted by submitit.

All nodes must see the folder of the results. A job that Slurm preempts or that runs out of time is
submitted again by the same command, and continues from its newest checkpoint.
"""

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stateline.compare.engine import Running
from stateline.compare.news import News
from stateline.compare.own_code import OwnCode, code_for_nodes, from_node, run_on_node
from stateline.devices import resolve_device
from stateline.errors import InputError, needed, reason
from stateline.runs.job import Job
from stateline.runs.results import RunRecord
from stateline.runs.start import begin
from stateline.runs.train import run_job
from stateline.settings import Count, NotNegative, Settings
from stateline.tasks import Task
from stateline.train.processes import Processes

SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True)
class Slurm(Settings):
    """Trains on a Slurm cluster.

    Args:
        gpus_per_job: GPUs that a job takes; with 0 it computes on the CPU. By default 1 if
            ``sinfo`` lists one in the partition of the jobs.
        cpus_per_job: Cores that a job takes, and its number of threads.
        options: Other parameters of submitit, such as ``slurm_partition`` and ``timeout_min``.
        cluster: ``slurm``, or ``local`` for processes on this machine.

    Raises:
        InputError: If a number is out of range, or ``gpus_per_job`` is no whole number.
    """

    gpus_per_job: NotNegative | None = None
    cpus_per_job: Count = 1
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    cluster: str = "slurm"

    def __post_init__(self) -> None:
        if (gpus := self.gpus_per_job or 0) % 1:
            raise InputError(
                f"gpus_per_job must be a whole number with --engine slurm, got {gpus:g}"
            )

    @contextmanager
    def open(self, folder: Path, tasks: Mapping[str, Task], news: News) -> Iterator[Running]:  # noqa: ARG002
        """See :meth:`Engine.open`.

        Raises:
            InputError: If submitit or Slurm is not there, or an option is unknown.
        """
        code, own = code_for_nodes(), replace(self, gpus_per_job=self._gpus())
        submitted = _Submitted(own, own._executor(folder), folder.absolute(), code)
        try:
            yield submitted
        finally:
            submitted.close()

    def _gpus(self) -> int:
        """How many GPUs a job takes."""
        if self.gpus_per_job is not None:
            return int(self.gpus_per_job)
        if self.cluster != "slurm" or shutil.which("sinfo") is None:
            return 0
        ask = ["sinfo", "--noheader", "--format=%P %G"]
        told = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
        wanted = str(self.options.get("slurm_partition", ""))
        for line in told.splitlines():
            partition, _, resources = line.partition(" ")
            mine = partition.strip("*") in wanted.split(",") if wanted else partition.endswith("*")
            if mine and "gpu" in resources:
                return 1
        return 0

    def _executor(self, folder: Path) -> Any:
        submitit = needed("submitit", "the engine slurm", "slurm")
        given = {"gpus_per_node": self.gpus_per_job, "cpus_per_task": self.cpus_per_job}
        try:
            executor = submitit.AutoExecutor(folder.absolute() / "slurm", cluster=self.cluster)
            executor.update_parameters(name="stateline", **given, **self.options)
        except (RuntimeError, ValueError, NameError, TypeError) as error:
            raise InputError(f"cannot submit to {self.cluster}: {reason(error)}") from error
        return executor


class _Submitted:
    """The jobs that have been submitted."""

    def __init__(self, engine: Slurm, executor: Any, folder: Path, code: OwnCode) -> None:
        self.executor, self.folder, self.code = executor, folder, code
        self.device, self.threads = "cuda:0" if engine.gpus_per_job else "cpu", engine.cpus_per_job
        self.running: list[tuple[Any, Job]] = []

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            where = self.folder / "runs" / job.name
            task = self.executor.submit(_work, job, where, self.code, self.device, self.threads)
            self.running.append((task, job))

    def finished(self) -> Iterator[tuple[Job, RunRecord]]:
        while self.running:
            for own in [own for own in self.running if own[0].done()]:
                self.running.remove(own)
                yield own[1], self._result(*own)
            time.sleep(SECONDS_BETWEEN_LOOKS if self.running else 0)

    def _result(self, task: Any, job: Job) -> RunRecord:
        if (error := task.exception()) is not None:
            last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            raise InputError(
                f"{job.name} was lost ({last[0]}): its log is {task.paths.stderr}; the same "
                "command resumes"
            )
        return from_node(task.result())

    def close(self) -> None:
        """Cancel the jobs that are under way; their checkpoints stay."""
        for task, _ in self.running:
            task.cancel()


def _work(job: Job, where: Path, code: OwnCode, device: str, threads: int) -> RunRecord | str:
    """On a node: run a job."""

    def run() -> RunRecord:
        processes = Processes(device=resolve_device(device))
        with begin(job, where, processes=processes) as start:
            return run_job(start, lambda _: None)

    return run_on_node(run, code, threads)
