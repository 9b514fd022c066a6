"""A page that follows a comparison."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stateline.cli import main, watch
from stateline.cli.watch import Watched
from stateline.runs import read_results

RECALL = "associative_recall(length=4, batch_size=4)"


def test_the_page_is_opened_once_and_reloaded_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs finish a second apart, so there is one page before the last, which stays."""
    monkeypatch.setattr("stateline.runs.score.EVAL_BATCHES", 1)
    opened: list[str] = []
    pages: list[str] = []

    def show(address: str) -> None:
        opened.append(address)
        pages.append((tmp_path / "report.html").read_text())

    monkeypatch.setattr(inspect.unwrap(Watched.__init__), "__defaults__", (show,))
    options = ["--tasks", RECALL, "--protocol", "quick", "--steps", "1", "--d_model", "8"]
    options += ["--workers", "0", "--timing", "none", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["compare", "lstm", "s4d", *options, "--watch"]) == 0
    assert opened == [(tmp_path / "report.html").as_uri()]
    assert f'<meta http-equiv="refresh" content="{watch.SECONDS}">' in pages[0]
    last = (tmp_path / "report.html").read_text()
    assert 'http-equiv="refresh"' not in last
    assert len(read_results(tmp_path).runs) == 2


@pytest.mark.usefixtures("unannotated")
def test_trials_write_no_page(tmp_path: Path) -> None:
    job: Any = SimpleNamespace(trial=True)
    run: Any = None
    Watched(tmp_path, [], show=lambda _: None).finished(job, run)
    assert list(tmp_path.iterdir()) == []
