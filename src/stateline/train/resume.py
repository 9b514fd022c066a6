"""Continuing a run from its newest checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stateline.files import write_text
from stateline.train.folder import check_run_folder, found
from stateline.train.metrics import METRICS, Metrics, Progress, read_metrics
from stateline.train.restore import read
from stateline.train.same_run import Wanted
from stateline.train.update import Updater


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
        wanted = Wanted.by(update.model, update.task, update.config, defined_by)
        progress, carried = read(kept[-1], update.model, update.optimizer, wanted, processes)
        if carried is not None:
            update.carry(carried)
        curve = [metrics for metrics in lines if metrics.step <= progress.steps]
    text = "".join(json.dumps(asdict(metrics)) + "\n" for metrics in curve)
    processes.on_main(lambda: write_text(folder / METRICS, text))
    return progress, curve
