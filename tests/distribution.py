"""The wheel and the sdist: built, installed into a fresh environment that borrows torch, and used
there.

``python tests/distribution.py`` (``make dist-check``). Only hatchling, which builds both, is
fetched, into a folder that goes again; what lambdahat needs is borrowed from the environment that
runs this.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRACE = """
import torch, lambdahat as lh
from importlib.metadata import version
assert "site-packages" in lh.__file__, lh.__file__
assert lh.__version__ == version("lambdahat"), (lh.__version__, version("lambdahat"))
x, y = lh.data.digits()
problem = lh.Problem(lh.models.mlp([64, 4, 10]), "cross_entropy", (x, y), dtype=torch.float64)
H = lh.hessian(problem)
exact, found = float(H.dense().trace()), float(lh.trace(H))
assert abs(found / exact - 1) < 1e-8, (found, exact)
import pathlib, tempfile
page = lh.page({"trace": lh.trace(H)}, pathlib.Path(tempfile.mkdtemp()) / "page.html")
assert "trace = " in page.read_text(encoding="utf-8")  # its templates and scripts are installed
print(f"trace {found:.6g}")
"""

FIRST = ROOT / "examples" / "notebooks" / "1-first-look.ipynb"
NOTEBOOK = """
import sys, tempfile, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
for cell in notebook.cells:
    if cell.cell_type == "code":
        cell.outputs = []
where = f"import lambdahat; assert lambdahat.__file__.startswith({sys.prefix!r})"
notebook.cells.insert(0, nbformat.v4.new_code_cell(where))
with tempfile.TemporaryDirectory() as folder:
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
shown = [kind for out in outputs for kind, data in out.get("data", {}).items() if data]
assert {"image/png", "text/html"} <= set(shown), shown
print(shown.count("text/html"), "tables,", shown.count("image/png"), "figures")
"""


def run(*command: str | Path, **environment: str) -> str:
    """What a command prints; its errors where it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        cwd=tempfile.gettempdir(),
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def pip_install(package: str | Path, target: str | Path, *options: str, **environment: str) -> None:
    """A package into a folder."""
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--target",
        target,
        *options,
        package,
        **environment,
    )


def build(folder: Path, tools: Path) -> tuple[Path, Path]:
    """The wheel and the sdist, by hatchling's hooks of PEP 517."""
    hooks = (
        "import os, sys; os.chdir(sys.argv[1]); from hatchling.build import build_sdist,"
        " build_wheel; print(build_wheel(sys.argv[2])); print(build_sdist(sys.argv[2]))"
    )
    wheel, sdist = run(
        sys.executable, "-c", hooks, ROOT, folder, PYTHONPATH=str(tools)
    ).splitlines()[-2:]
    return folder / wheel, folder / sdist


def used(package: Path, folder: Path, tools: Path) -> str:
    """Install into a fresh environment without dependencies, and measure; what the command and
    the script print.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python, borrowed = folder / "bin" / "python", sysconfig.get_path("purelib")
    target = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    pip_install(
        package, target, "--no-deps", "--no-index", "--no-build-isolation", PYTHONPATH=str(tools)
    )
    # its own first; an editable install is not seen through a path
    path = f"{target}{os.pathsep}{borrowed}"
    trace = run(python, "-c", TRACE, PYTHONPATH=path)
    notebook = run(python, "-c", NOTEBOOK, FIRST, PYTHONPATH=path, OMP_NUM_THREADS="1")
    version = run(python, "-m", "lambdahat", "--version", PYTHONPATH=path)
    return f"{version}, {trace}, {FIRST.name}: {notebook}"


def contents(wheel: Path, sdist: Path) -> None:
    """Data and type marks are in the wheel, tests and documentation in the sdist, and neither
    has what is not ours.
    """
    inside = zipfile.ZipFile(wheel).namelist()
    for name in ("py.typed", "data/digits.npz", "singular/references.json", "bench/suite.py"):
        assert f"lambdahat/{name}" in inside, name
    with tarfile.open(sdist) as archive:
        names = {member.split("/", 1)[-1] for member in archive.getnames()}
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "tests/cases.py",
        "docs/index.md",
        "CHANGELOG.md",
    ):
        assert name in names, name
    others = ("carry/", "site/", ".venv/", "benchmarks/scratch/", "benchmarks/results/")
    strangers = [name for name in names if name.startswith(others)]
    assert not strangers, strangers[:5]


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder, tools = Path(place), Path(place) / "tools"
        pip_install("hatchling", tools)
        wheel, sdist = build(folder, tools)
        contents(wheel, sdist)
        for package in (wheel, sdist):
            print(f"{package.name}: {used(package, folder / package.suffix[1:], tools)}")


if __name__ == "__main__":
    main()
