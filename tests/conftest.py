"""Where official vectors and real data lie; tests that need them skip, saying so, without them."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared"


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
