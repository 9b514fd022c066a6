"""Runs: what a training run is, how it is trained and scored, and the results it leaves.

Importing this package does not import PyTorch; :mod:`stateline.runs.train` and
:mod:`stateline.runs.speed` do.
"""

from stateline.runs.folder import read_results, read_run, stored_run
from stateline.runs.protocol_records import ProtocolRecord, TrialRecord
from stateline.runs.results import (
    FORMAT,
    CapacityRecord,
    CurvePoint,
    Results,
    RunRecord,
    Source,
    SpeedRecord,
    TaskRecord,
    TimingRecord,
)

__all__ = [
    "FORMAT",
    "CapacityRecord",
    "CurvePoint",
    "ProtocolRecord",
    "Results",
    "RunRecord",
    "Source",
    "SpeedRecord",
    "TaskRecord",
    "TimingRecord",
    "TrialRecord",
    "read_results",
    "read_run",
    "stored_run",
]
