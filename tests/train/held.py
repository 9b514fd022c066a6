"""What a checkpoint holds, however many processes wrote it."""

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
