"""The notebooks of ``examples/notebooks``: run them, store what they show, compare two runs.

``python tests/notebooks.py [NAME …]`` runs those whose file names contain a NAME, or all, and
stores their outputs. What is stored has no times, no machine names and no progress bars.
"""

import math
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
WITH_ERROR = re.compile(r"(-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?) ± (\d[\d,]*\.?\d*(?:e[-+]?\d+)?)")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(path, timeout=900):
    """The notebook with fresh outputs, run by this Python in an empty folder."""
    notebook = nbformat.read(path, as_version=4)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": folder}})
        client.execute(env=environment)
    return clean(notebook)


def clean(notebook):
    """Leave out what changes from run to run without a reason."""
    notebook.metadata = nbformat.NotebookNode({"kernelspec": KERNEL})
    for place, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{place}", nbformat.NotebookNode()
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if not _is_finished_bar(one)]
    return notebook


def _is_finished_bar(output):
    return output.get("data") == {"text/html": "", "text/plain": ""}


def mime_types(notebook):
    """The kinds of everything that a notebook shows."""
    return {kind for output in outputs(notebook) for kind in output.get("data", {})}


def outputs(notebook):
    """All outputs, in order."""
    return [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]


def printed(notebook):
    """What all cells print."""
    return "".join(out.text for out in outputs(notebook) if out.output_type == "stream")


def assert_consistent(stored, fresh):
    """The numbers that two runs print with errors agree within four standard errors.

    Networks trained on machines that round differently differ by more than an exact trace errs, so
    that 2 % of the value are allowed, too.
    """
    before, now = (estimates(printed(notebook)) for notebook in (stored, fresh))
    assert before, "a notebook prints its key numbers with errors"
    for (value, error), (value_now, error_now) in zip(before, now, strict=True):
        allowed = 4 * math.hypot(error, error_now) + 0.02 * abs(value)
        assert abs(value - value_now) <= allowed, f"{value} ± {error} is {value_now} ± {error_now}"


def estimates(text):
    """The numbers with a standard error in a text, and these."""
    found = WITH_ERROR.findall(text)
    return [tuple(float(part.replace(",", "")) for part in pair) for pair in found]


if __name__ == "__main__":
    for path in NOTEBOOKS:
        if not sys.argv[1:] or any(name in path.name for name in sys.argv[1:]):
            nbformat.write(execute(path), path)
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
