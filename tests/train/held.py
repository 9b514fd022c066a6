"""Runs of several processes, and what their checkpoints hold."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file


def held(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint; the rows of the carried state are joined."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            assert name not in tensors or name.startswith("carried/")
            tensors[name] = _joined(tensors[name], tensor) if name in tensors else tensor
    return tensors


def _joined(rows: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """All rows; a cache of keys has as many slots as the longest of its own rows needs."""
    if rows.ndim > 1:
        slots = max(rows.shape[1], more.shape[1])
        rows, more = (
            torch.cat([t, t.new_zeros(len(t), slots - t.shape[1], *t.shape[2:])], dim=1)
            for t in (rows, more)
        )
    return torch.cat([rows, more])


def forked(what: str, home: Path, *more: str) -> list[list[int]]:
    """Do what forked.py does; the signals of its processes."""
    script = [sys.executable, str(Path(__file__).with_name("forked.py")), what, str(home), *more]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ends: list[list[int]] = json.loads(done.stdout)
    return ends
