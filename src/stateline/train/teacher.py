"""What a teacher gives for a batch: computed, or read from the disk."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.files import write_atomically
from stateline.generate.hugging_face import HUGGING_FACE, read_hugging_face
from stateline.generate.runs import load_run, weights_hash
from stateline.models.language_model import LanguageModel


class TransformersTeacher(nn.Module):
    """A causal language model of the package transformers, which gives logits alone.

    Args:
        folder: Folder of the model.
        device: Device of the model.
    """

    def __init__(self, folder: str, device: torch.device) -> None:
        super().__init__()
        self.model = read_hugging_face(folder, device=device, dtype=torch.float32)
        self.config = self.model.config.get_text_config()

    def forward(self, tokens: Tensor, starts: Any = None) -> Float[Tensor, "batch length vocab"]:
        """Logits; a row is one document.

        Raises:
            InputError: If rows are packed.
        """
        if starts is not None:
            raise InputError(
                "a teacher of transformers reads rows of one document, got packed rows: leave out "
                "hf:, or take a task whose rows are not packed"
            )
        return self.model(tokens, use_cache=False).logits


Teacher = LanguageModel | TransformersTeacher


def load_teacher(spec: str, device: torch.device) -> Teacher:
    """Read a teacher in float32.

    Raises:
        InputError: If there is none.
    """
    if spec.startswith(HUGGING_FACE):
        return TransformersTeacher(spec.removeprefix(HUGGING_FACE), device)
    return load_run(spec, device=device, dtype=torch.float32)[0]


def teacher_hash(spec: str | None) -> str:
    """The hash of a teacher's weights; empty if there is none."""
    return weights_hash(spec.removeprefix(HUGGING_FACE)) if spec else ""


class Outputs:
    """What a teacher gave for batches, by the hash of its weights and of the batch.

    Args:
        folder: Folder of the files; ``None`` keeps nothing.
        teacher: Hash of the teacher.
    """

    def __init__(self, folder: str | None, teacher: str) -> None:
        self.folder, self.teacher = None if folder is None else Path(folder), teacher

    def of(
        self, name: str, batch: list[Tensor], compute: Callable[[], Mapping[str, Tensor]]
    ) -> Mapping[str, Tensor]:
        """Tensors by name, from the disk if they are there.

        Args:
            name: What is computed.
            batch: All that it depends on but the teacher.
            compute: Computes it.

        Raises:
            InputError: If a file is damaged, or cannot be written.
        """
        if self.folder is None:
            return compute()
        digest = hashlib.sha256(f"{self.teacher} {name}".encode())
        for tensor in batch:
            digest.update(tensor.contiguous().numpy(force=True).tobytes())
        path = self.folder / f"{digest.hexdigest()[:32]}.safetensors"
        if not path.exists():
            found = compute()
            kept = {key: tensor.contiguous() for key, tensor in found.items()}
            write_atomically(path, lambda file: save_file(kept, file))
            return found
        try:
            return load_file(path, device=str(batch[0].device))
        except SafetensorError as error:
            raise InputError(f"{path} is damaged: {error}; remove it") from error
