"""Checks of a checkpoint's contents before a model or an optimizer is given them.

Every function raises ValueError with what is wrong.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.files import has_hash, read_json_object, write_text
from stateline.generate.state_checks import state_fault
from stateline.settings import check_settings
from stateline.train.metrics import Ending
from stateline.train.tensor_files import Entry

MANIFEST = "manifest.json"


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        steps: Number of updates.
        tokens: Number of tokens trained on.
        seconds: Time spent in updates.
        losses: Losses of the updates since the last line of metrics.
        steps_to_solve: Updates before the first score that reached the task's ``solved_at``.
        stopped: Why the run ended; empty while it runs.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    steps_to_solve: int | None = None
    stopped: str = ""


def write_manifest(folder: Path, hashes: Mapping[str, str]) -> None:
    """Write the hashes of all files of a checkpoint."""
    write_text(folder / MANIFEST, json.dumps({"sha256": dict(sorted(hashes.items()))}))


def check_manifest(folder: Path, names: Collection[str], checked: Iterable[str]) -> None:
    """Compare files with their hashes; checkpoints of older versions have no manifest.

    Args:
        folder: The checkpoint.
        names: The files that the manifest must list.
        checked: The files to be compared, some of which others may compare.
    """
    if not (folder / MANIFEST).exists():
        return
    hashes = read_json_object(folder / MANIFEST, "manifest").get("sha256")
    if not isinstance(hashes, dict) or not set(names) <= set(hashes):
        raise ValueError(f"{MANIFEST} does not list its files")
    for name in checked:
        if not has_hash(folder / name, hashes[name]):
            raise ValueError(f"{name} is not as it was written")


def checked_progress(path: Path, kept: Any, steps: int) -> Progress:
    """The progress of a checkpoint, if it is complete and agrees with the folder's name."""
    if not isinstance(kept, dict) or kept.keys() != vars(Progress()).keys():
        raise ValueError("its progress is incomplete")
    progress = Progress(**kept)
    check_settings("its progress", progress)
    if path.name != f"step-{progress.steps:08}":
        raise ValueError(f"it is of step {progress.steps}")
    if progress.stopped not in ("", *get_args(Ending)):
        raise ValueError(f"its run ended as {progress.stopped[:40]!r}")
    solved = progress.steps_to_solve or 0
    if not 0 <= solved <= progress.steps <= steps or progress.tokens < 0 or progress.seconds < 0:
        raise ValueError("its progress is out of range")
    if not all(isinstance(loss, float) and math.isfinite(loss) for loss in progress.losses):
        raise ValueError("its losses are not finite numbers")
    return progress


def check_tensors(
    kind: str, tensors: Mapping[str, Entry | Tensor], wanted: Mapping[str, Tensor]
) -> None:
    """Compare names, shapes and dtypes with other tensors'."""
    for name in {**wanted, **tensors}:
        if name not in tensors:
            raise ValueError(f"its {kind} lack {name!r}")
        if name not in wanted:
            raise ValueError(f"its {kind} have {name!r}, which the model does not have")
        found, like = tensors[name], wanted[name]
        if found.shape != like.shape or found.dtype != like.dtype:
            raise ValueError(
                f"its {kind} {name!r} are {found.dtype} of shape {tuple(found.shape)}, not "
                f"{like.dtype} of shape {tuple(like.shape)}"
            )


def check_values(kind: str, tensors: Mapping[str, Entry], steps: int) -> None:
    """Refuse NaN and infinity, negative mean squares and impossible numbers of steps."""
    for name, entry in tensors.items():
        most = steps if name.endswith("/step") else math.inf
        positive = name.endswith(("/exp_avg_sq", "_var", "/variance", "/step"))
        for piece in entry.pieces():
            if not piece.isfinite().all():
                raise ValueError(f"its {kind} {name!r} are not all finite")
            if positive and piece.min() < 0:
                raise ValueError(f"its {kind} {name!r} are negative")
            if piece.max() > most:
                raise ValueError(f"its {kind} {name!r} are of step {float(piece.max()):g}")


def check_moments(
    moments: Mapping[str, Entry], wanted: Mapping[str, Mapping[str, Tensor]], steps: int
) -> None:
    """Check the optimizer's moments of every parameter; one without any gradient has none.

    Args:
        moments: By ``parameter/kind``.
        wanted: Tensors like the moments of each parameter.
        steps: Number of updates.
    """
    owners = {name.rpartition("/")[0] for name in moments}
    expected = {f"{o}/{kind}": x for o in owners & wanted.keys() for kind, x in wanted[o].items()}
    check_tensors("moments", moments, expected)
    if steps and not moments:
        raise ValueError("it has no moments")


def check_random(random: Tensor) -> None:
    """Check that a generator accepts a random state."""
    generator = torch.Generator()
    like = generator.get_state()
    check_tensors("random state", {"random": random}, {"random": like})
    try:
        generator.set_state(random)
    except RuntimeError as error:
        raise ValueError("its random state is invalid") from error


def checked_carried(tensors: Mapping[str, Entry], template: Callable[[int], Any], rows: int) -> Any:
    """The carried state of some rows.

    Args:
        tensors: Its leaves by number.
        template: Returns a state of one row of the model, with room for some steps.
        rows: Their number.
    """
    structure = pytree.tree_structure(template(0))
    if tensors.keys() != {str(number) for number in range(structure.num_leaves)}:
        raise ValueError(f"its carried state must have {structure.num_leaves} tensors")
    leaves = [tensors[str(number)].read() for number in range(structure.num_leaves)]
    state = pytree.tree_unflatten(leaves, structure)
    if fault := state_fault(state, template, rows=rows):
        raise ValueError(f"of its carried state, {fault}")
    return state
