"""The tutorial, a notebook, runs and prints what it is stored with."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"


@pytest.mark.slow  # starts a kernel and trains a model
def test_the_tutorial_prints_what_is_shown(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient, which is in stateline[dev]")
    nbclient = pytest.importorskip("nbclient", reason="is in stateline[dev]")
    pytest.importorskip("ipykernel", reason="is in stateline[dev]")
    stored = nbformat.read(NOTEBOOK, as_version=4)
    run = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(run, timeout=900, resources=place).execute()

    def outputs(notebook: object) -> list[str]:
        """What each cell prints; the kernel sends it in one piece or several."""
        cells = notebook.cells  # type: ignore[attr-defined]
        pieces = [[out.get("text", "") for out in cell.get("outputs", [])] for cell in cells]
        return ["".join(each) for each in pieces]

    assert sum(map(bool, outputs(stored))) >= 6
    assert outputs(run) == outputs(stored)
