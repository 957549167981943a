"""How large is the library, and how far is it from a public name to its answer?

    python benchmarks/house.py            # sizes and names
    python benchmarks/house.py --walks    # also the calls behind three public names
    python benchmarks/house.py --walks --list    # and every file and function of these walks

counts the files and lines of ``src/lambdahat`` as the formatter writes them, modules that a single
other module imports, private functions that are called from one place, and names that are used
twice. A walk counts the files and the distinct functions of the library that run between a public
call and its result; the way there (imports, building the problem) is left out.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = SOURCE / "lambdahat"
SHORT = 300  # lines; a longer module may have a file of its own, whoever imports it


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.Module, modules: set[str], nested: bool = True) -> Iterator[str]:
    """The library's modules that a file imports at its top and, if ``nested``, in functions."""
    for node in ast.walk(tree) if nested else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            if any(name not in modules for name in inner):
                yield node.module
            yield from (name for name in inner if name in modules)


def sizes() -> dict[str, object]:
    """Counts over the whole package; lists where a reader needs the names."""
    trees = parsed()
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in trees}
    paths = {module_name(path): path for path in trees}
    importers = defaultdict(set)
    for path, tree in trees.items():
        for name in imported_modules(tree, set(paths)):
            importers[name].add(module_name(path))
    lone = [
        name
        for name, users in importers.items()
        if len(users) == 1
        and paths[name].stem != "__init__"
        and lines[paths[name]] < SHORT
        and next(iter(users)).rsplit(".", 1)[0] == name.rsplit(".", 1)[0]
        and paths[next(iter(users))].stem != "__init__"
    ]
    stems = Counter(path.stem for path in trees if path.stem not in ("__init__", "__main__"))
    classes = Counter(
        node.name
        for tree in trees.values()
        for node in ast.iter_child_nodes(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    private = 0
    for tree in trees.values():
        uses = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        private += sum(
            isinstance(node, ast.FunctionDef) and node.name.startswith("_") and uses[node.name] == 1
            for node in ast.iter_child_nodes(tree)
        )
    return {
        "files": len(trees),
        "lines": sum(lines.values()),
        "modules under 300 lines with one importing sibling": sorted(lone),
        "file names used twice": sorted(name for name, count in stems.items() if count > 1),
        "public class names used twice": sorted(
            name for name, count in classes.items() if count > 1
        ),
        "private functions used once": private,
        "private names imported elsewhere": borrowed_names(),
        "import cycles": [", ".join(sorted(cycle)) for cycle in import_cycles()],
        "lines by room": Counter(
            {
                room: sum(
                    count
                    for path, count in lines.items()
                    if path.relative_to(PACKAGE).parts[0] == room
                )
                for room in {path.relative_to(PACKAGE).parts[0] for path in trees}
            }
        ).most_common(),
        "files by room": Counter(
            path.relative_to(PACKAGE).parts[0] for path in trees
        ).most_common(),
    }


@cache
def parsed() -> dict[Path, ast.Module]:
    """The syntax trees of all files, parsed once."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def borrowed_names() -> list[str]:
    """Private names that a module imports from another one."""
    trees = parsed()
    modules = {module_name(path) for path in trees}
    return sorted(
        f"{module_name(path)} takes {node.module}.{alias.name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lambdahat")
        for alias in node.names
        if alias.name.startswith("_")
        and not alias.name.startswith("__")
        and f"{node.module}.{alias.name}" not in modules
    )


def import_cycles() -> list[set[str]]:
    """Groups of modules that import one another when they are loaded."""
    trees = parsed()
    modules = {module_name(path) for path in trees}
    edges = {
        module_name(path): set(imported_modules(tree, modules, nested=False))
        for path, tree in trees.items()
    }
    # A module that imports nothing which is left is in no cycle; nor is one that nothing imports.
    left = set(modules)
    while True:
        sinks = {name for name in left if not edges[name] & left}
        sources = left - {name for user in left for name in edges[user]}
        if not sinks | sources:
            return [left] if left else []
        left -= sinks | sources


def walk(work: Callable[[], object]) -> dict[str, list[str]]:
    """The functions of the library that run during ``work``, by file."""
    seen = set()

    def note(frame, event, _):  # type: ignore[no-untyped-def]
        code = frame.f_code
        ours = event == "call" and code.co_filename.startswith(str(PACKAGE))
        if ours and not code.co_name.startswith("<"):
            seen.add((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    functions = defaultdict(list)
    for path, name in sorted(seen):
        functions[str(Path(path).relative_to(PACKAGE))].append(name)
    return functions


def walks() -> dict[str, dict[str, list[str]]]:
    """The walks of ``lh.trace``, ``lh.llc`` and ``reproduce ngd-digits``, each run once before."""
    import torch

    import lambdahat as lh
    from lambdahat.experiments import find, sweep

    torch.set_num_threads(1)

    def make_problem() -> lh.Problem:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        data = torch.randn(64, 8), torch.randint(3, (64,))
        return lh.Problem(model, "cross_entropy", data)

    def reproduce() -> None:
        with tempfile.TemporaryDirectory() as folder:
            sweep(find("ngd-digits"), folder, scale="smoke")

    calls: dict[str, Callable[[lh.Problem], object]] = {
        "lh.trace(lh.hessian(p))": lambda problem: lh.trace(lh.hessian(problem)),
        "lh.llc(p)": lambda problem: lh.llc(problem, chains=2, draws=50, seed=0),
        "reproduce ngd-digits": lambda _: reproduce(),
    }
    found = {}
    for name, call in calls.items():
        call(make_problem())  # imports, and what is kept between calls
        problem = make_problem()
        found[name] = walk(lambda call=call, problem=problem: call(problem))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--walks", action="store_true", help="also count calls")
    parser.add_argument("--list", action="store_true", help="name the functions of the walks")
    arguments = parser.parse_args()
    for name, value in sizes().items():
        if name.endswith("by room"):
            print(f"{name}: " + ", ".join(f"{room} {count:,}" for room, count in value))
        elif isinstance(value, list):
            print(f"{name}: {len(value)} ({', '.join(value)})")
        else:
            print(f"{name}: {value:,}")
    if arguments.walks:
        for name, files in walks().items():
            print(f"{name}: {len(files)} files, {sum(map(len, files.values()))} functions")
            for path, functions in files.items() if arguments.list else ():
                print(f"  {path} {len(functions)}: {', '.join(functions)}")


if __name__ == "__main__":
    main()
