"""Measuring what one model costs: speed, state size and operations."""

from pathlib import Path

import torch
from msgspec import UNSET

from stateline.bench.speed import decode_tokens_per_second, train_tokens_per_second
from stateline.capacity import longest_copy
from stateline.files import write_text
from stateline.models.factory import make_model
from stateline.models.language_model import LanguageModel
from stateline.models.size import count_parameters, meta_model
from stateline.runs.folder import RESULT, slug, stored
from stateline.runs.job import Job, digest
from stateline.runs.results import SpeedRecord, to_json
from stateline.train.loop import ALONE

SPEED_LENGTHS = (256, 1024)
"""Sequence lengths at which training is timed; tokens in the state when decoding is timed."""

STATE_LENGTHS = (256, 1024, 4096, 16384, 65536)
"""Lengths at which state bytes and operations are counted."""


def time_job(job: Job, folder: Path, device: torch.device = ALONE.device) -> SpeedRecord:
    """Speed, state size and operations of one model, measured now or earlier.

    Args:
        job: Its model is measured, its training says in which precision.
        folder: Folder of the comparison; earlier measurements are in ``speed``.
        device: Where to measure.
    """
    precision = job.training.precision
    path = folder / "speed" / f"{slug(job.model.pattern)}--{digest(job.model)}"
    if (device.type, precision) != ("cpu", "float32"):
        path = path.with_name(f"{path.name}--{slug(str(device))}-{precision}")
    if (earlier := stored(path, SpeedRecord)) is not None:
        return earlier
    torch.manual_seed(0)
    model, counted = make_model(job.model).to(device), meta_model(job.model)
    training = {n: train_tokens_per_second(model, n, precision=precision) for n in SPEED_LENGTHS}
    entry = SpeedRecord(
        model=job.label,
        task=job.task,
        d_model=job.model.d_model,
        parameters=count_parameters(job.model),
        train_tokens_per_second=training,
        decode_tokens_per_second={n: decode_tokens_per_second(model, n) for n in SPEED_LENGTHS},
        state_bytes={n: counted.state_bytes(n) for n in STATE_LENGTHS},
        flops_per_token={n: counted.flops_per_token(n) for n in STATE_LENGTHS},
        longest_copy=longest_copy(counted) if isinstance(counted, LanguageModel) else UNSET,
        device=device.type,
        precision=precision,
    )
    write_text(path / RESULT, to_json(entry))
    return entry
