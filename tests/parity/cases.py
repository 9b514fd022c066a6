"""Official vectors: cases found by the description beside them, and tests that say what they cover.

A description is a JSON file; the tensors lie in a safetensors file of the same name (or the one
that it names). A published model is a folder with ``config.json``, ``meta.json`` and its tensors.
What kind a case is of stands in the description, never in where it lies.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

Test = TypeVar("Test", bound=Callable[..., None])

COVERED_BY: dict[str, set[ModuleType]] = {}
"""Kinds of vectors, and the test modules that cover them."""

NOT_YET: dict[str, str] = {
    "block_recurrent_transformer": (
        "a variant by others, with shared keys, rotary positions and gates of its own, that is not "
        "the paper's model; the official layers are covered: block_recurrent_layer"
    ),
}
"""Kinds that no test covers yet, each with the reason."""


@dataclass(frozen=True)
class Case:
    """One official vector.

    Attributes:
        kind: What it is a vector of.
        path: Of its description.
        about: The description.
    """

    kind: str
    path: Path
    about: Any = field(repr=False)

    @property
    def name(self) -> str:
        """For test ids."""
        return self.path.parent.name if self.path.stem == "meta" else self.path.stem

    def tensors(self, file: str | None = None) -> dict[str, Tensor]:
        """Tensors of the case, or of another file beside its description, on the tests' device."""
        named = file or (isinstance(self.about, dict) and self.about.get("file"))
        path = self.path.parent / named if named else self.path.with_suffix(".safetensors")
        return {name: torch.as_tensor(tensor) for name, tensor in load_file(path).items()}


def here() -> torch.device:
    """Where tensors of tests are: models that are loaded belong there."""
    return torch.empty(0).device


def covers(*kinds: str, where: Callable[[Case], object] = bool) -> Callable[[Test], Test]:
    """Run a test on every case of these kinds for which ``where`` holds, as argument ``case``."""

    def mark(test: Test) -> Test:
        for kind in kinds:
            COVERED_BY.setdefault(kind, set()).add(sys.modules[test.__module__])
        return pytest.mark.parity(*kinds, where=where)(test)

    return mark


@cache
def find_cases(folder: Path) -> list[Case]:
    """All cases below a folder, in order of their paths."""
    return sorted(_cases(folder), key=lambda case: case.path)


def _cases(folder: Path) -> Iterator[Case]:
    for path in folder.rglob("*.json"):
        about = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(about, list) or path.name in ("config.json", "generation_config.json"):
            continue  # an index; part of a published model
        yield Case(_kind(path, about), path, about)
    for path in folder.rglob("*.safetensors"):
        siblings = [p for p in path.parent.glob("*.json") if path.name.startswith(p.stem)]
        if not siblings and not (path.parent / "meta.json").exists():
            yield Case(path.stem, path, {})


def _kind(path: Path, about: dict[str, Any]) -> str:
    if "kind" in about:
        return str(about["kind"])
    if path.name == "meta.json" and (path.parent / "config.json").exists():
        config = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
        return str(config.get("model_type") or ("mamba_ssm" if "ssm_cfg" in config else "model"))
    if "nlayers" in about.get("args", {}):
        return _staircase_kind(about)
    described = {
        "idx2word": "algorithm-task tokens",
        "phone_book": "pretrained_prompts",
        "hard_alibi": "official_models",
    }
    for key, kind in described.items():
        if key in about:
            return kind
    if "ParticleCollisionData" in about.get("description", ""):
        return "object_collision"
    if any(key.startswith(("train/", "eval/")) for key in about):
        return "tasks"
    return path.stem


def _staircase_kind(about: dict[str, Any]) -> str:
    """The staircase models have arguments and a sentence."""
    if "M" in about["args"]:
        return "cached_staircase"
    if "order" in about["args"]:
        return "ladder"
    official = {
        "FeedbackTransformer": "feedback",
        "StaircaseModel": "staircase",
        "TransformerSeq": "transformer_xl",
    }
    found = [kind for name, kind in official.items() if name in about["description"]]
    return found[0] if found else about["case"]
