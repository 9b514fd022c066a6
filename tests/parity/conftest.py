"""A test marked with ``covers`` runs once per case of its kinds, wherever ``--vectors`` points."""

from pathlib import Path

import pytest

from tests.parity.cases import find_cases


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "parity(*kinds): runs on every official vector of the kinds")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("parity")
    if marker is None:
        return
    folder: Path = metafunc.config.getoption("--vectors")
    found = (case for case in find_cases(folder) if case.kind in marker.args)
    cases = [case for case in found if marker.kwargs["where"](case)]
    if cases:
        metafunc.parametrize("case", cases, ids=lambda case: case.name)
    else:
        reason = f"no vectors of {', '.join(marker.args)} in {folder}: name a folder with --vectors"
        metafunc.parametrize("case", [pytest.param(None, marks=pytest.mark.skip(reason))], ids=[""])
