"""A job from its start to its record."""

from collections.abc import Callable
from pathlib import Path

from stateline.runs.job import Job
from stateline.runs.results import RunRecord
from stateline.runs.start import begin
from stateline.runs.train import run_job
from stateline.train.loop import ALONE
from stateline.train.metrics import Metrics
from stateline.train.processes import Processes


def run_whole(
    job: Job,
    folder: Path,
    on_log: Callable[[Metrics], None] = lambda _: None,
    *,
    processes: Processes = ALONE,
) -> RunRecord:
    """Begin a job, or go on with it, and train and score it."""
    with begin(job, folder, processes=processes) as start:
        return run_job(start, on_log)
