"""Which claims of the papers hold here? The verdicts of stored runs, as the tables of a page.

    lambdahat reproduce NAME --scale cpu --out benchmarks/results/reproductions
    python benchmarks/reproductions.py benchmarks/results/reproductions --page docs/reproductions.md

reads the stores of a folder, judges the claims of their experiments and puts the tables between the marks of the page.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lambdahat.cli.reproduce import claims_table
from lambdahat.cli.tables import markdown_table
from lambdahat.experiments import registry
from lambdahat.experiments.store import Store, stores_in

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def section(store: Store) -> str:
    experiment, about = registry.find(store.experiment), store.about()
    table = claims_table(experiment, store)
    made = f"`{about['command']}`" if about.get("command") else f"scale {store.scale}"
    head = f"### {experiment.title}\n\n{experiment.paper}; `{experiment.name}`, {made}, torch {about['torch']}."
    rows = [tuple(cell.replace("|", "\\|") for cell in row) for row in table.rows]
    return f"{head}\n\n{markdown_table(table.header, rows)}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", type=Path, required=True)
    args = parser.parse_args()
    found = {store.experiment: store for store in stores_in(args.folder) if len(store.rows())}
    sections = [section(found[name]) for name in registry.PLACES if name in found]
    text = args.page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    body = "\n\n".join([BEGIN, *sections, END])
    args.page.write_text(before + body + after, encoding="utf-8")


if __name__ == "__main__":
    main()
