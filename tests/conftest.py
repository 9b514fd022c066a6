"""What tests of all parts share.

Where official vectors and real data lie: tests that need them skip, saying so, without them.
"""

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, settings

SHARED = Path(__file__).parents[2] / "shared"

torch.set_num_threads(1)  # tests run side by side, and tensors here are small
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vectors", metavar="DIR", type=Path, default=SHARED / "vectors")
    parser.addoption("--data", metavar="DIR", type=Path, default=SHARED / "data")


@pytest.fixture(scope="session")
def vectors(request: pytest.FixtureRequest) -> Path:
    return _folder_or_skip(request, "--vectors", "official vectors")


@pytest.fixture(scope="session")
def data(request: pytest.FixtureRequest) -> Path:
    return _folder_or_skip(request, "--data", "real data")


def _folder_or_skip(request: pytest.FixtureRequest, option: str, what: str) -> Path:
    folder: Path = request.config.getoption(option)
    if not folder.is_dir():
        pytest.skip(f"no {what} in {folder}: name their folder with {option} DIR")
    return folder


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """``with full_disk(n):`` no file can grow beyond n bytes."""

    @contextmanager
    def limited(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture
def unannotated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the library as users do: without the checks of annotations that tests add."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def quick_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons spend no time on measurements of speed."""
    monkeypatch.setattr("stateline.compare.run.SPEED_LENGTHS", (8, 16))
    monkeypatch.setattr("stateline.compare.run.STATE_LENGTHS", (8, 16))
    monkeypatch.setattr("stateline.bench.speed.SECONDS", 0.0)
    monkeypatch.setattr("stateline.bench.speed.TOKENS_PER_BATCH", 32)
    monkeypatch.setattr("stateline.bench.speed.DECODE_STEPS", 2)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons train in this process, one run after the other, and score briefly."""
    from stateline import compare  # here, so that the check of annotations is in place before

    def train_all(
        jobs: Sequence[Any], folder: Path, workers: int, news: Any
    ) -> Iterator[tuple[Any, Any]]:
        for job in jobs:
            yield job, compare.run_job(job, folder / "runs" / job.name, partial(news.progress, job))

    monkeypatch.setattr(compare, "train_all", train_all)
    monkeypatch.setattr("stateline.compare.run.EVAL_BATCHES", 1)
