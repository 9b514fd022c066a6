"""Measuring what models cost: speed, all in the same rounds, state size and operations."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from msgspec import UNSET
from msgspec.structs import replace

from stateline.bench.side_by_side import Timed, measure
from stateline.bench.speed import Cell, Subject, train_batch
from stateline.bench.timing import use_threads, watch_load
from stateline.capacity import longest_copy
from stateline.files import write_text
from stateline.models.factory import make_model
from stateline.models.language_model import LanguageModel
from stateline.models.size import count_parameters, meta_model
from stateline.runs.folder import RESULT, SPEED, slug, stored
from stateline.runs.job import Job, digest
from stateline.runs.record import Record
from stateline.runs.results import SpeedRecord, TimingRecord, to_json
from stateline.train.environment import environment
from stateline.train.loop import ALONE

Detail = Literal["short", "full", "none"]

SPEED_LENGTHS = (256, 1024)
"""Sequence lengths at which training is timed; tokens in the state when decoding is timed."""

STATE_LENGTHS = (256, 1024, 4096, 16384, 65536)
"""Lengths for counting state bytes and operations, and, with ``full``, for timing all speeds."""

BATCHES = (1, 64)
"""Rows for which speeds are timed with ``full``."""

SECONDS = 0.4
"""Time for each model and cell, after the warm-up."""

MOST_SECONDS = {"short": 20.0, "full": 4.0}
"""A model whose call takes longer is left out of a cell."""


class _Together(Record, frozen=True, kw_only=True):
    """Speeds that were measured in the same rounds, in the order of the models."""

    records: list[SpeedRecord]


def cells(detail: Detail) -> list[Cell]:
    """The measurements.

    Args:
        detail: ``short`` (decoding and training at 256 and 1,024 tokens, prefill at 1,024),
            ``full`` (256 to 65,536 tokens, 1 and 64 rows) or ``none``.
    """
    if detail == "none":
        return []
    short = detail == "short"
    lengths, batches = (SPEED_LENGTHS, (1,)) if short else (STATE_LENGTHS, BATCHES)
    grid = [(length, batch) for length in lengths for batch in batches]
    trained = [(length, train_batch(length)) for length in lengths]
    if not short:
        trained = sorted({*grid, *trained})
    return [
        *(Cell("prefill", *size) for size in (grid[-1:] if short else grid)),
        *(Cell("decode", *size) for size in grid),
        *(Cell("train", *size) for size in trained),
    ]


def time_jobs(
    jobs: Sequence[Job],
    folder: Path,
    device: torch.device = ALONE.device,
    detail: Detail = "short",
    tell: Callable[[Cell], object] = lambda _: None,
) -> list[SpeedRecord]:
    """Speed, state size and operations of models; earlier measurements are reused.

    Args:
        jobs: Jobs whose models are measured, in the precision of their training.
        folder: Folder of the comparison; earlier measurements of the same models are in ``speed``.
        device: Device of the models.
        detail: What is timed, see :func:`cells`.
        tell: Called with each cell before it is measured.
    """
    if not jobs:
        return []
    settings = [f"{digest(job.model)} {job.training.precision}" for job in jobs]
    text = "\n".join([*settings, detail, str(device)])
    name = f"{slug(jobs[0].task)}--{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    path = folder / SPEED / name
    found = stored(path, _Together)
    if found is None or len(found.records) != len(jobs):
        found = _Together(records=list(_timed(jobs, device, detail, tell)))
        write_text(path / RESULT, to_json(found))
    return [
        replace(record, model=job.label, task=job.task)
        for job, record in zip(jobs, found.records, strict=True)
    ]


def _timed(
    jobs: Sequence[Job], device: torch.device, detail: Detail, tell: Callable[[Cell], object]
) -> Iterator[SpeedRecord]:
    """Build all models, measure them in the same rounds, and describe each."""
    measured: dict[str, list[Timed]] = {}
    busy = None
    if what := cells(detail):
        torch.manual_seed(0)
        subjects = {
            str(number): Subject(make_model(job.model).to(device), job.training.precision)
            for number, job in enumerate(jobs)
        }
        with use_threads(1), watch_load() as load:
            measured = measure(subjects, what, SECONDS, tell, MOST_SECONDS[detail])
        if load.foreign_cores is not None:
            busy = min(1.0, load.foreign_cores / (os.cpu_count() or 1))
    on_gpu = device.type == "cuda"
    machine = torch.cuda.get_device_name(device) if on_gpu else str(environment()["cpu"])
    for number, job in enumerate(jobs):
        record = described(job, [_timing(entry) for entry in measured.get(str(number), ())])
        yield replace(record, device=device.type, machine=machine, busy=busy)


def described(job: Job, timings: Sequence[TimingRecord] = ()) -> SpeedRecord:
    """What is counted of a job's model without running it, and its timings."""
    counted = meta_model(job.model)
    lengths = STATE_LENGTHS if counted.causal else ()  # others have no state

    def speeds(phase: str, batch: Callable[[int], int]) -> dict[int, int | float]:
        own = [t for t in timings if t.phase == phase and t.batch == batch(t.length)]
        return {t.length: t.tokens_per_second for t in own if t.tokens_per_second}

    return SpeedRecord(
        model=job.label,
        task=job.task,
        d_model=job.model.d_model,
        parameters=count_parameters(job.model),
        train_tokens_per_second=speeds("train", train_batch),
        decode_tokens_per_second=speeds("decode", lambda _: 1),
        state_bytes={n: counted.state_bytes(n) for n in lengths},
        flops_per_token={n: counted.flops_per_token(n) for n in STATE_LENGTHS},
        longest_copy=longest_copy(counted) if isinstance(counted, LanguageModel) else UNSET,
        precision=job.training.precision,
        timings=list(timings),
    )


def _timing(measured: Timed) -> TimingRecord:
    low, median, high = measured.spread or (None, None, None)
    return TimingRecord(
        **measured.cell._asdict(),
        tokens_per_second=median,
        low=low,
        high=high,
        rounds=len(measured.speeds),
        peak_memory=measured.peak,
        skipped=measured.skipped,
    )
