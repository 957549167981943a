"""Do the stored experiments still give the same results? Digests of everything that is read from
their stores.

    python benchmarks/stores.py save FILE
    python benchmarks/stores.py check FILE

``save`` writes a JSON file with digests of each experiment's description and of its grid at each
scale, and, for every store in benchmarks/results/reproductions, of its rows, verdicts, tables,
charts and notes. ``check`` compares the present code with such a file and names what differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from lambdahat.experiments import every
from lambdahat.experiments.kit.cells import key_of
from lambdahat.experiments.kit.experiment import SCALES, findings
from lambdahat.experiments.kit.store import stores_in

STORES = Path(__file__).parent / "results" / "reproductions"
DESCRIPTION = ("name", "title", "paper", "part", "assumptions", "size", "sizes")


def plain(value: Any) -> Any:
    """A value as JSON; of a dataclass the fields that differ from their defaults."""
    if is_dataclass(value):
        found = {field.name: (field.default, getattr(value, field.name)) for field in fields(value)}
        return {
            name: plain(now)
            for name, (default, now) in found.items()
            if default is MISSING or plain(default) != plain(now)
        }
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(part) for part in value]
    return value if value is None or isinstance(value, str | bool) else repr(value)


def digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(plain(value)).encode(), digest_size=8).hexdigest()


def digests() -> dict[str, dict[str, str]]:
    out = {}
    for experiment in every():
        told = {name: getattr(experiment, name) for name in DESCRIPTION}
        out[experiment.name] = {"description": digest(told)}
        for scale in SCALES:
            size = [experiment.trained(scale), experiment.reduced(scale)]
            out[experiment.name] |= {
                f"cells {scale}": digest([key_of(cell) for cell in experiment.grid(scale)]),
                f"size {scale}": digest([*size, experiment.stand_in(scale)]),
            }
    experiments = {experiment.name: experiment for experiment in every()}
    for store in stores_in(STORES):
        found = findings(experiments[store.experiment], store)
        out[store.path.name] = {
            "finished": digest(sorted(store.finished())),
            "rows": digest(store.rows()),
            "verdicts": digest(found.verdicts),
            "tables": digest(found.tables),
            "charts": digest(found.charts),
            "notes": digest(found.notes),
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("save", "check"))
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    now = digests()
    if args.action == "save":
        args.file.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
        return
    before = json.loads(args.file.read_text(encoding="utf-8"))
    parts = [
        f"{name}: {part}"
        for name in before | now
        for part in before.get(name, {}) | now.get(name, {})
        if before.get(name, {}).get(part) != now.get(name, {}).get(part)
    ]
    if parts:
        raise SystemExit("\n".join(["These differ:", *parts]))
    print(f"{len(now)} experiments and stores say the same")


if __name__ == "__main__":
    main()
