"""The notebook runs from its first cell to its last."""

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
NOTEBOOK = Path(__file__).parents[2] / "experiments" / "notebooks" / "quickstart.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # one device, as for its readers
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[2]))
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(notebook, timeout=1500, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


def test_its_committed_outputs_are_whole():
    cells = [cell for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
