"""Official samples of the tasks, found by what a vector file says of itself, not by its name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file


class Synthetic(NamedTuple):
    """One official case: its arguments, and inputs and targets of both splits."""

    args: dict[str, Any]
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    @property
    def examples(self) -> Iterator[list[int]]:
        """Whole examples of both splits: inputs and the last target."""
        for x, y in [(self.train_x, self.train_y), (self.test_x, self.test_y)]:
            yield from (
                np.append(row, last).tolist() for row, last in zip(x, y[:, -1], strict=True)
            )


@pytest.fixture(scope="session")
def official_synthetics(vectors: Path) -> list[Synthetic]:
    """Every case of every vector file of the kind ``synthetics``."""
    cases = []
    for path, described in _descriptions(vectors):
        if described.get("kind") == "synthetics":
            tensors = load_file(path.parent / described["file"])
            for name, case in described["cases"].items():
                fields = (tensors[f"{name}.{field}"] for field in Synthetic._fields[1:])
                cases.append(Synthetic(case["args"], *fields))
    return cases or pytest.skip(f"no official synthetic tasks in {vectors}")


@pytest.fixture(scope="session")
def official_strings(vectors: Path) -> dict[str, dict[str, Any]]:
    """Every case of the copying family, by a name that begins with ``train/`` or ``eval/``."""
    cases = {
        name: case
        for _, described in _descriptions(vectors)
        for name, case in described.items()
        if name.startswith(("train/", "eval/")) and "input_ids" in case
    }
    return cases or pytest.skip(f"no official copying strings in {vectors}")


def _descriptions(vectors: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(vectors.rglob("*.json")):
        described = json.loads(path.read_text())
        if isinstance(described, dict):
            yield path, described
