"""No official vector lies unused, and no setting of one is ignored."""

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity.cases import COVERED_BY, NOT_YET, Case, find_cases
from tests.parity.fields import unread


@pytest.fixture(autouse=True)
def imported() -> None:
    """Importing a test module registers the kinds that it covers."""
    for module in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(f"tests.parity.{module.stem}")


def test_every_kind_is_tested_or_listed_with_its_reason(vectors: Path) -> None:
    known = COVERED_BY.keys() | NOT_YET.keys()
    unused = {case.kind: case.name for case in find_cases(vectors) if case.kind not in known}
    assert not unused, f"kinds of vectors that are neither tested nor listed in NOT_YET: {unused}"


def test_no_kind_is_listed_both_as_covered_and_as_not_yet_covered() -> None:
    assert not COVERED_BY.keys() & NOT_YET.keys()


def test_every_setting_of_every_case_is_read_or_listed(vectors: Path) -> None:
    cases = (case for case in find_cases(vectors) if case.kind in COVERED_BY)
    ignored = {case.name: found for case in cases if (found := unread(case))}
    assert not ignored, f"settings that tests must read, or UNREAD list: {ignored}"


@pytest.mark.parametrize(
    ("kind", "add"),
    [
        ("s4d_kernel", lambda about: about["config"].update(real_kind="relu")),
        ("s4d_kernel", lambda about: about.update(clipped=True)),
        ("h3_lm", lambda about: about["config"].update(glu_act=True)),
        ("staircase", lambda about: about["args"].update(adapt_span=True)),
        ("synthetics", lambda about: next(iter(about["cases"].values()))["args"].update(noise=1)),
    ],
)
def test_a_setting_that_no_test_reads_is_noticed(
    vectors: Path, kind: str, add: Callable[[Any], None]
) -> None:
    case = next((case for case in find_cases(vectors) if case.kind == kind), None)
    if case is None:
        pytest.skip(f"no vectors of {kind} in {vectors}")
    assert not unread(case)
    about = copy.deepcopy(case.about)
    add(about)
    assert len(unread(Case(kind, case.path, about))) == 1


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("h3_lm", "max_pos"),
        ("s4d_kernel", "real_type"),
        ("synthetics", "induction_num_triggers"),
        ("synthetics", "allow_dot"),
    ],
)
def test_settings_that_only_other_vectors_have_are_read(kind: str, name: str) -> None:
    assert not unread(Case(kind, Path("case.json"), {"config": {name: "x"}}))
