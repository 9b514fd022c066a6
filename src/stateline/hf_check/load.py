"""Reading a causal language model of ``transformers``, also one of ours."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from stateline.generate.hugging_face import read_hugging_face


def load_hugging_face(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Any:
    """As ``generate.hugging_face.read_hugging_face``; the package also knows our own models."""
    import_module("stateline.hf")
    return read_hugging_face(folder, device=device, dtype=dtype)
