"""The options that say where the jobs of a comparison are trained, and who is told of them."""

from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import ArgumentParser

from stateline.errors import InputError

if TYPE_CHECKING:
    from stateline.compare.engine import Engine
    from stateline.compare.storage import ResultsFolder
    from stateline.compare.trackers import Tracked

_OF_RAY = ("address", "gpus_per_job", "cpus_per_job", "retries")


def add_engine_options(parser: ArgumentParser) -> None:
    """Add ``--engine`` and the options of a cluster; pass their values to :func:`make_engine`."""
    option = parser.add_argument
    option(
        "--workers",
        type=int | None,
        default=None,
        help="models trained at a time, each in its own process; by default as many as there are "
        "cores for their threads, or one per GPU; 0 trains one after the other in this process",
    )
    option("--threads", type=int, default=1, help="threads of each model on the CPU")
    option("--workers_per_gpu", type=int, default=1, help="models that share a GPU, if small")
    option(
        "--engine",
        type=Literal["local", "ray"],
        default="local",
        help="where models are trained: on this machine, or on the nodes of a Ray cluster",
    )
    option(
        "--address",
        type=str | None,
        default=None,
        help="of ray: the cluster, as auto or HOST:6379; without it, Ray is started here",
    )
    option(
        "--gpus_per_job",
        type=float | None,
        default=None,
        help="of ray: by default 1 if a node has a GPU, else 0",
    )
    option("--cpus_per_job", type=int | None, default=None, help="of ray: by default 1")
    option(
        "--retries",
        type=int | None,
        default=None,
        help="of ray: how often a job goes on elsewhere after its node was lost; by default 3",
    )


def add_tracker_option(parser: ArgumentParser) -> None:
    """Add ``--tracker``; pass its value to :func:`trackers`."""
    parser.add_argument(
        "--tracker",
        type=str | None,
        default=None,
        help="wandb, mlflow, or MODULE:FUNCTION or FILE.py:FUNCTION, called with run, step and "
        "scalars",
    )


def trackers(given: str | None) -> "list[Tracked]":
    """The observer that passes metrics to the tracker that was named; none without one."""
    from stateline.compare.trackers import Tracked, load_tracker

    return [] if given is None else [Tracked(load_tracker(given))]


def make_engine(given: Any, place: "ResultsFolder") -> "Engine":
    """The engine that the options ask for.

    Raises:
        InputError: If an option is out of range or of another engine.
    """
    options = {name: given[name] for name in _OF_RAY if given[name] is not None}
    if given.engine == "ray":
        from stateline.compare.cluster import Ray

        return Ray(**options, mirror=place.mirror)
    if options:
        raise InputError(f"--{next(iter(options))} is an option of --engine ray")
    from stateline.compare.pool import Local, worker_devices
    from stateline.devices import resolve_device

    devices = worker_devices(
        given.device, given.workers, threads=given.threads, per_gpu=given.workers_per_gpu
    )
    return Local(devices, resolve_device(given.device), given.threads)
