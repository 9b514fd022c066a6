"""The engine ``ray``: jobs on the nodes of a Ray cluster.

Ray is imported only when this engine is opened. Every job is one task of Ray. If its node is lost,
Ray starts the task again on another one, where it continues from its newest checkpoint. Therefore
all nodes must see the results: in a shared folder, or in a storage that fsspec knows.
"""

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stateline.compare.engine import Running
from stateline.compare.news import News
from stateline.compare.own_code import OwnCode, code_for_nodes, from_node, run_on_node
from stateline.compare.storage import Mirror
from stateline.errors import InputError, needed, reason
from stateline.runs.job import Job
from stateline.runs.results import RunRecord
from stateline.runs.start import begin
from stateline.runs.train import run_job
from stateline.settings import Count, NotNegative, Settings, Size
from stateline.tasks import Task
from stateline.train.folder import found
from stateline.train.metrics import Metrics
from stateline.train.processes import Processes
from stateline.workers import wait_passively

SECONDS_BETWEEN_NEWS = 0.5


@dataclass(frozen=True)
class Ray(Settings):
    """Trains on a Ray cluster.

    Args:
        address: Address of the cluster, as ``ray://host:10001`` or ``host:6379``; ``auto`` finds
            the one of this node. Without it, Ray is started on this machine alone.
        gpus_per_job: GPUs that a job takes; with 0 it computes on the CPU. By default 1 if a node
            of the cluster has one.
        cpus_per_job: Cores that a job takes, and its number of threads.
        retries: How often a job is started again after its node or process was lost.
        mirror: The storage of the results, if they are not in a folder that all nodes share.

    Raises:
        InputError: If a number is out of range.
    """

    address: str | None = None
    gpus_per_job: NotNegative | None = None
    cpus_per_job: Count = 1
    retries: Size = 3
    mirror: Mirror | None = None

    @contextmanager
    def open(self, folder: Path, tasks: Mapping[str, Task], news: News) -> Iterator[Running]:  # noqa: ARG002
        """See :meth:`Engine.open`.

        Raises:
            InputError: If Ray is not installed, the cluster cannot be reached, or no node has
                enough CPUs and GPUs for a job.
        """
        code = code_for_nodes()
        with ExitStack() as opened:
            ray = _connect(self.address, opened)
            own = replace(self, gpus_per_job=self._gpus(ray))
            nodes = _Nodes(own, ray, folder.absolute(), code, news)
            opened.callback(nodes.close)
            yield nodes

    def _gpus(self, ray: Any) -> float:
        """GPUs per job; InputError if no node has enough CPUs and GPUs for a job."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = self.gpus_per_job
        if gpus is None:
            gpus = 1 if any(node.get("GPU", 0) >= 1 for node in nodes) else 0
        wanted = {"CPU": self.cpus_per_job, "GPU": gpus}
        if not any(all(n.get(k, 0) >= v for k, v in wanted.items()) for n in nodes):
            raise InputError(
                f"no node of the cluster has {self.cpus_per_job} CPUs and {gpus:g} "
                "GPUs for a job: start such nodes first, or lower cpus_per_job and gpus_per_job"
            )
        return gpus


class _Nodes:
    """A connection to a cluster, and the jobs that have been submitted to it."""

    def __init__(self, engine: Ray, ray: Any, folder: Path, code: OwnCode, news: News) -> None:
        self.engine, self.ray, self.folder, self.code, self.news = engine, ray, folder, code, news
        self.running: dict[Any, Job] = {}
        self.jobs: dict[str, Job] = {}
        self.inbox = ray.remote(num_cpus=0)(_Inbox).remote()
        self.work = ray.remote(
            num_cpus=engine.cpus_per_job, num_gpus=engine.gpus_per_job, max_retries=engine.retries
        )(_work)

    def submit(self, jobs: Sequence[Job]) -> None:
        if jobs and not self.jobs:
            total = self.ray.cluster_resources().get("CPU", 1)
            self.news.starting(min(len(jobs), max(1, int(total // self.engine.cpus_per_job))))
        mirror, threads = self.engine.mirror, self.engine.cpus_per_job
        on_gpu, remote = bool(self.engine.gpus_per_job), mirror is not None
        for job in jobs:
            self.jobs[job.name] = job
            where = f"{self.folder if mirror is None else mirror.url}/runs/{job.name}"
            task = self.work.remote(job, where, remote, self.code, threads, on_gpu, self.inbox)
            self.running[task] = job

    def finished(self) -> Iterator[tuple[Job, RunRecord]]:
        while self.running:
            done, _ = self.ray.wait(list(self.running), timeout=SECONDS_BETWEEN_NEWS)
            for name, metrics in self._news():
                self.news.progress(self.jobs[name], metrics)
            for task in done:
                yield self._result(task)

    def _result(self, task: Any) -> tuple[Job, RunRecord]:
        job = self.running.pop(task)
        try:
            run = from_node(self.ray.get(task))
        except self.ray.exceptions.RayTaskError:
            raise  # an error in the program
        except self.ray.exceptions.RayError as error:
            raise InputError(
                f"{job.name} was lost {self.engine.retries + 1} times ({type(error).__name__}): "
                "the same command resumes; more --retries, or fewer jobs per node, may help"
            ) from error
        if self.engine.mirror is not None:
            self.engine.mirror.fetch(f"runs/{job.name}")
        return job, run

    def _news(self) -> list[tuple[str, Metrics]]:
        try:
            return self.ray.get(self.inbox.take.remote())
        except self.ray.exceptions.RayError:  # lost progress must not end the comparison
            return []

    def close(self) -> None:
        """Stop the jobs that are under way; their checkpoints stay."""
        for task in self.running:
            self.ray.cancel(task, force=True)


class _Inbox:
    """On a node: collects progress until it is asked for."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Metrics]] = []

    def put(self, name: str, metrics: Metrics) -> None:
        self.messages.append((name, metrics))

    def take(self) -> list[tuple[str, Metrics]]:
        taken, self.messages = self.messages, []
        return taken


def _connect(address: str | None, opened: ExitStack) -> Any:
    """Ray, connected; what is started here is stopped when ``opened`` ends."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    wait_passively()  # for nodes that are started here
    ray = needed("ray", "the engine ray", "ray")
    if ray.is_initialized():
        return ray
    options: dict[str, Any] = {"address": address}
    if address is None:
        options = {"address": "local", "_node_ip_address": "127.0.0.1", "include_dashboard": False}
    try:
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = address or "on this machine"
        raise InputError(f"cannot connect to the Ray cluster {where}: {reason(error)}") from error
    opened.callback(ray.shutdown)
    return ray


def _work(
    job: Job, where: str, remote: bool, code: OwnCode, threads: int, on_gpu: bool, inbox: Any
) -> RunRecord | str:
    """On a node: run a job in a folder, or in a copy of one that is in a storage.

    Without ``on_gpu`` it runs on the CPU: some versions of Ray make all GPUs visible to a job that
    asks for none.
    """
    on_gpu = on_gpu and torch.cuda.is_available()
    processes = Processes(device=torch.device("cuda", 0) if on_gpu else torch.device("cpu"))

    def tell(metrics: Metrics) -> None:
        inbox.put.remote(job.name, metrics)

    def run() -> RunRecord:
        if not remote:
            with begin(job, Path(where), processes=processes) as start:
                return run_job(start, tell)
        with tempfile.TemporaryDirectory(prefix="stateline-") as scratch:
            folder = Path(scratch)
            mirror = Mirror(where, folder)
            mirror.fetch()
            kept = found(folder)

            def save() -> bool:
                """After every update: copy a new checkpoint to the storage; never interrupt."""
                nonlocal kept
                if (now := found(folder)) != kept:
                    mirror.push()
                    kept = now
                return False

            with begin(job, folder, processes=processes) as start:
                record = run_job(start, tell, interrupted=save)
            mirror.push()
            return record

    return run_on_node(run, code, threads)
