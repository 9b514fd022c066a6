"""Continuing a run from its newest checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from stateline.files import write_text
from stateline.train.checkpoint import Progress, Wanted, read
from stateline.train.config import TrainConfig
from stateline.train.folder import check_run_folder, found
from stateline.train.metrics import METRICS, Metrics, read_metrics
from stateline.train.update import Updater

FREE = ("save_every", "keep", "parallel", "shard", "compile")
"""Settings that may change when a run continues: they affect what it learns only by rounding."""


def settings_that_count(config: TrainConfig) -> dict[str, Any]:
    """The settings that must be the same when a run continues."""
    return {name: value for name, value in asdict(config).items() if name not in FREE}


def resume(
    update: Updater, defined_by: Mapping[str, Any], folder: Path
) -> tuple[Progress, list[Metrics]]:
    """Continue from the newest checkpoint, or begin; nothing is written before all is read.

    Args:
        update: The model, its optimizer and the state that it carries, which are filled.
        defined_by: What defines the run, as plain data; checkpoints of other runs are refused.
        folder: Folder of the run.

    Returns:
        The progress, and the lines of metrics up to it.

    Raises:
        InputError: If the folder cannot be written to, or its checkpoint cannot be used.
    """
    progress, curve, processes = Progress(), list[Metrics](), update.processes
    processes.on_main(lambda: check_run_folder(folder))
    if kept := found(folder):
        lines = read_metrics(folder / METRICS)
        wanted = _wanted(update, defined_by)
        progress, carried = read(kept[-1], update.model, update.optimizer, wanted, processes)
        if carried is not None:
            update.carry(carried)
        curve = [metrics for metrics in lines if metrics.step <= progress.steps]
    text = "".join(json.dumps(asdict(metrics)) + "\n" for metrics in curve)
    processes.on_main(lambda: write_text(folder / METRICS, text))
    return progress, curve


def _wanted(update: Updater, defined_by: Mapping[str, Any]) -> Wanted:
    """Requirements on a checkpoint from which this run can continue."""
    config, run = update.config, defined_by["run"]
    defaults: dict[str, Any] = {"train": _defaults(config)}
    if isinstance(run, dict) and "model" in run:
        defaults["run"] = {"model": _defaults(update.model.config)}
    rows = update.task.batch_size if config.carry_state else None
    return Wanted(defined_by, defaults, config.steps, rows)


def _defaults(settings: Any) -> dict[str, Any]:
    """Settings of a dataclass that have a default, as plain data."""
    plain: dict[str, Any] = {}
    for field in fields(settings):
        if field.default is not MISSING:
            plain[field.name] = field.default
        elif field.default_factory is not MISSING:
            plain[field.name] = field.default_factory()
    return {k: v for k, v in plain.items() if k not in FREE}
