"""Options and fixtures for the tests of all parts.

Tests of real data need its folder (``--data DIR``) and are skipped without it.
"""

import importlib
import logging
import re
import resource
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, settings

SHARED = Path(__file__).parents[2] / "shared"
VECTORS = Path(__file__).parent / "parity" / "vectors"
COMPUTING = {
    *("bench", "compare", "generate", "hf", "hf_check", "layers", "models", "parity", "probe"),
    *("runs", "train", "test_capacity.py", "test_compare.py", "test_evaluate.py"),
}
"""Folders and files of tests that compute with models, on the device of ``--device``."""
NO_NUMBA = "import failed: numba is not installed", "numba runs on the CPU, not on"
"""Reasons of the backend numba for which a test that asks for it is skipped."""

torch.backends.cudnn.allow_tf32 = False  # as in matrix products: float32 is float32
torch.set_num_threads(1)  # tests run side by side, and tensors here are small
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
# Any test may be the first that compiles a kernel; those about this line read it in a new process.
logging.getLogger("stateline").addFilter(
    lambda record: not record.getMessage().startswith("compiling new CPU kernels")
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vectors", metavar="DIR", type=Path, default=VECTORS)
    parser.addoption("--fla", metavar="DIR", type=Path, help="of flash-linear-attention")
    parser.addoption("--xlstm", metavar="DIR", type=Path, help="of NX-AI/xlstm")
    parser.addoption("--mamba", metavar="DIR", type=Path, help="of state-spaces/mamba")
    parser.addoption("--mohawk", metavar="DIR", type=Path, help="of goombalab/phi-mamba")
    parser.addoption("--lolcats", metavar="DIR", type=Path, help="of HazyResearch/lolcats")
    parser.addoption("--data", metavar="DIR", type=Path, default=SHARED / "data")
    parser.addoption("--models", metavar="DIR", type=Path, help="of released models")
    parser.addoption("--device", metavar="NAME", default="cpu")
    parser.addoption("--part", metavar="K/N", help="only the tests K, K + N, K + 2 N, ...")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--part"):
        first, parts = map(int, config.getoption("--part").split("/"))
        kept = items[first::parts]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """Skip tests that require the kernels of numba where it is not installed, or on a GPU."""
    try:
        return (yield)
    except Exception as error:
        if "backend 'numba' cannot run" in str(error):
            for reason in NO_NUMBA:
                if reason in str(error):
                    pytest.skip(reason)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Put what a module of tests makes when it is imported on the device of ``--device``."""
    with _placed(collector):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Put what a test and its fixtures make on the device of ``--device``."""
    with _placed(item):
        return (yield)


@pytest.fixture(scope="session")
def vectors(request: pytest.FixtureRequest) -> Path:
    return _folder_or_skip(request, "--vectors", "official vectors")


@pytest.fixture(scope="session")
def data(request: pytest.FixtureRequest) -> Path:
    return _folder_or_skip(request, "--data", "real data")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where tests compute: ``--device``."""
    return _device(request.config)


def _device(config: pytest.Config) -> torch.device:
    if (name := config.getoption("--device")) == "fake":
        importlib.import_module("tests.devices")
        return torch.device(name)
    from stateline.devices import resolve_device  # not before jaxtyping can check the annotations

    return resolve_device(name)


def _placed(node: pytest.Item | pytest.Collector) -> AbstractContextManager[None]:
    """Put what a node of the tests makes on the device of ``--device``, if it computes."""
    if (device := _device(node.config)).type == "cpu":
        return nullcontext()
    parts = node.path.relative_to(node.config.rootpath).parts
    if len(parts) < 2 or parts[1] not in COMPUTING or _is_of_the_cpu(node):
        return nullcontext()
    from tests.placement import placed

    return placed(device)


def _is_of_the_cpu(node: pytest.Item | pytest.Collector) -> bool:
    """Whether a node has the mark ``cpu``; a module that is not imported yet, in its text."""
    if isinstance(node, pytest.Module):
        text = node.path.read_text(encoding="utf-8")
        return bool(re.search(r"^pytestmark = (.+\n)*?.*\bmark\.cpu\b", text, re.MULTILINE))
    return node.get_closest_marker("cpu") is not None


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
    """Run the library as users do: without the type checks that ``make test-all`` adds."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


QUICK_SPEED = {
    "runs.speed.SPEED_LENGTHS": (8, 16),
    "runs.speed.STATE_LENGTHS": (8, 16),
    "runs.speed.SECONDS": 0.0,
    "bench.timing.SAMPLE_SECONDS": 0.0,
    "bench.side_by_side.peak_bytes": lambda *_: 1,
    "bench.speed.TOKENS_PER_BATCH": 32,
    "bench.speed.DECODE_STEPS": 2,
}
ONE_PROCESS = {"compare.pool._devices": lambda *_: [], "runs.score.EVAL_BATCHES": 1}


@pytest.fixture
def quick_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons spend no time on measurements of speed."""
    for name, value in QUICK_SPEED.items():
        monkeypatch.setattr(f"stateline.{name}", value)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons train in this process, one run after the other, and score briefly."""
    for name, value in ONE_PROCESS.items():
        monkeypatch.setattr(f"stateline.{name}", value)
