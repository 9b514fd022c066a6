"""No official vector lies unused."""

import importlib
from pathlib import Path

from tests.parity.cases import COVERED, NOT_YET, find_cases


def test_every_kind_is_tested_or_listed_with_its_reason(vectors: Path) -> None:
    for module in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(f"tests.parity.{module.stem}")
    unused = {
        case.kind: case.name
        for case in find_cases(vectors)
        if case.kind not in COVERED and case.kind not in NOT_YET
    }
    assert not unused, f"kinds of vectors that are neither tested nor listed in NOT_YET: {unused}"


def test_nothing_is_listed_as_not_yet_covered_that_is() -> None:
    assert not COVERED & set(NOT_YET)
