"""The options for the engine of a comparison, which trains its jobs, and for its trackers."""

from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import ArgumentParser

from stateline.errors import InputError

if TYPE_CHECKING:
    from stateline.compare.engine import Engine
    from stateline.compare.slurm import Slurm
    from stateline.compare.storage import ResultsFolder
    from stateline.compare.trackers import Tracked

_OPTIONS = {
    "ray": ("address", "gpus_per_job", "cpus_per_job", "retries"),
    "slurm": ("gpus_per_job", "cpus_per_job", "slurm"),
}
"""Options by the engine that has them."""


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
        type=Literal["local", "ray", "slurm"],
        default="local",
        help="where models are trained: on this machine, on a Ray cluster, or by Slurm",
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
        help="of ray, slurm: by default 1 if a node has a GPU, of slurm in the partition, else 0",
    )
    option("--cpus_per_job", type=int | None, default=None, help="of ray, slurm: by default 1")
    option(
        "--slurm",
        nargs="+",
        type=str,
        default=None,
        metavar="NAME=VALUE",
        help="of slurm: parameters of submitit, as slurm_partition=gpu timeout_min=600",
    )
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
    known = _OPTIONS.get(given.engine, ())
    options = {name: given[name] for name in _OPTIONS["ray"] if given[name] is not None}
    options |= {} if given.slurm is None else {"slurm": given.slurm}
    for name in options:
        if name not in known:
            engines = " or ".join(engine for engine, own in _OPTIONS.items() if name in own)
            raise InputError(f"--{name} is an option of --engine {engines}")
    if given.engine == "ray":
        from stateline.compare.cluster import Ray

        return Ray(**options, mirror=place.mirror)
    if given.engine == "slurm":
        from stateline.compare.slurm import Slurm

        return _slurm(Slurm, options)
    from stateline.compare.pool import Local, worker_devices
    from stateline.devices import resolve_device

    devices = worker_devices(
        given.device, given.workers, threads=given.threads, per_gpu=given.workers_per_gpu
    )
    return Local(devices, resolve_device(given.device), given.threads)


def _slurm(engine: "type[Slurm]", options: dict[str, Any]) -> "Slurm":
    """The engine with the parameters of submitit; texts of digits become integers."""
    pairs = [text.partition("=") for text in options.pop("slurm", [])]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise InputError(f"--slurm needs NAME=VALUE, got {name + equals + value!r:.60}")
    given = {name: int(value) if value.isdecimal() else value for name, _, value in pairs}
    gpus = options.pop("gpus_per_job", None)
    if gpus is not None and gpus != int(gpus):
        raise InputError(f"gpus_per_job must be a whole number with --engine slurm, got {gpus:g}")
    return engine(gpus_per_job=None if gpus is None else int(gpus), options=given, **options)
