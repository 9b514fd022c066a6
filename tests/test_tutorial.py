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
        cells = notebook.cells  # type: ignore[attr-defined]
        return [out.text for cell in cells for out in cell.get("outputs", []) if "text" in out]

    assert len(outputs(stored)) >= 6
    assert outputs(run) == outputs(stored)
