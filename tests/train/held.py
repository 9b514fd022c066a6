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
            tensors[name] = torch.cat([tensors[name], tensor]) if name in tensors else tensor
    return tensors


def forked(what: str, home: Path, *more: str) -> list[list[int]]:
    """Do what forked.py does; the signals of its processes."""
    script = [sys.executable, str(Path(__file__).with_name("forked.py")), what, str(home), *more]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ends: list[list[int]] = json.loads(done.stdout)
    return ends
