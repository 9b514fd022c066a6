"""One hook for experiment trackers: a function that is called with every line of metrics."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from stateline.compare.news import News
from stateline.errors import InputError, reason
from stateline.pattern import parse_pattern
from stateline.plugins import import_code
from stateline.runs.job import Job
from stateline.runs.results import RunRecord
from stateline.tasks import TASKS
from stateline.train.metrics import Metrics

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunInfo:
    """The description of a run that a tracker gets.

    Attributes:
        name: Name of the run's folder, which no other run of a comparison has.
        model: Name of the model: its alias, pattern or preset.
        task: The task with its keywords.
        seed: Seed of the weights and of the data.
        settings: Everything else that defines the run, as plain data.
    """

    name: str
    model: str
    task: str
    seed: int
    settings: Mapping[str, Any]

    @property
    def title(self) -> str:
        """Its name for readers."""
        return f"{self.model} {self.task} {self.seed}"


Tracker = Callable[[RunInfo, int, Mapping[str, float]], object]
"""``tracker(run, step, scalars)`` is called in the main process with every line of metrics, and
when a run is done with its scores, such as ``accuracy/40`` at length 40."""


class Tracked(News):
    """Passes metrics on to a tracker. If it fails, that is logged once, and the run continues.

    Args:
        tracker: The function.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker: Tracker | None = tracker

    def progress(self, job: Job, metrics: Metrics) -> None:
        """Pass on the numbers of a line of metrics."""
        values = {name: value for name, value in asdict(metrics).items() if value is not None}
        del values["step"], values["steps"]
        if "metric" in values:
            values[TASKS[parse_pattern(job.task)[0].name].metric] = values.pop("metric")
        self._tell(job, metrics.step, values)

    def finished(self, job: Job, run: RunRecord) -> None:
        """Pass on the scores by length."""
        scores = {
            f"{name}/{length}": value
            for length, own in run.by_length.items()
            for name, value in own.items()
            if value is not None
        }
        if scores:
            self._tell(job, run.steps, scores)

    def _tell(self, job: Job, step: int, scalars: Mapping[str, float]) -> None:
        if self.tracker is None:
            return
        settings = {k: v for k, v in asdict(job).items() if k not in ("task", "alias")}
        info = RunInfo(job.name, job.label, job.task, job.training.seed, settings)
        try:
            self.tracker(info, step, scalars)
        except Exception as error:  # an error in the user's code must not end a run
            self.tracker = None
            text = f"{type(error).__name__}: {reason(error)}"
            _log.warning("the tracker failed and is not called again: %s", text)


def wandb_tracker() -> Tracker:
    """Each run is a run of Weights & Biases in the project ``stateline``, or ``WANDB_PROJECT``."""
    wandb = _installed("wandb")
    runs: dict[str, Any] = {}

    def log(run: RunInfo, step: int, scalars: Mapping[str, float]) -> None:
        if run.name not in runs:
            runs[run.name] = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "stateline"),
                id=run.name,
                name=run.title,
                config=dict(run.settings),
                resume="allow",
                reinit="create_new",
            )
        runs[run.name].log(dict(scalars), step=step)

    return log


def mlflow_tracker() -> Tracker:
    """Each run is a run of MLflow, in the experiment that its environment variables name."""
    client = _installed("mlflow").MlflowClient()
    runs: dict[str, str] = {}

    def log(run: RunInfo, step: int, scalars: Mapping[str, float]) -> None:
        if run.name not in runs:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
            made = client.create_run(experiment, run_name=run.title, tags={"folder": run.name})
            runs[run.name] = made.info.run_id
        for name, value in scalars.items():
            client.log_metric(runs[run.name], name, value, step=step)

    return log


TRACKERS = {"wandb": wandb_tracker, "mlflow": mlflow_tracker}
"""Trackers by name."""


def _installed(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise InputError(f"the tracker {name} needs its package: pip install {name}") from error


def tracked(spec: str | None) -> list[Tracked]:
    """The observer for a tracker, see :func:`load_tracker`; none without one."""
    return [] if spec is None else [Tracked(load_tracker(spec))]


def load_tracker(spec: str) -> Tracker:
    """The tracker of a name in :data:`TRACKERS`, or a ``module:function`` or ``file.py:function``.

    Raises:
        InputError: If it cannot be imported, or is no function.
    """
    if spec in TRACKERS:
        return TRACKERS[spec]()
    place, colon, name = spec.rpartition(":")
    if not colon or not place:
        raise InputError(
            f"a tracker must be {', '.join(TRACKERS)}, module:function or file.py:function, got "
            f"{spec!r}"
        )
    tracker: Any = getattr(import_code(place, record=False), name, None)
    if not callable(tracker):
        raise InputError(
            f"{place} has no function {name!r}: name one that takes run, step, scalars"
        )
    return tracker
