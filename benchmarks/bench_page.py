"""What does everything cost? The tables and figures of docs/bench.md, from stored runs of
``lambdahat bench``.

    lambdahat bench --peers --out FOLDER
    cp FOLDER/bench.json benchmarks/results/bench-cpu.json
    python benchmarks/bench_page.py

puts, for each bench-NAME.json in benchmarks/results, a figure, the findings and a table between the
marks of the page.
"""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from lambdahat.bench import BenchResult
from lambdahat.cli.bench_command import HEADER, as_row, findings, headline
from lambdahat.cli.printing import markdown_table
from lambdahat.report.figures import plot

ROOT = Path(__file__).parents[1]
PAGE, FIGURES, RESULTS = (
    ROOT / "docs" / "bench.md",
    ROOT / "docs" / "figures",
    ROOT / "benchmarks" / "results",
)
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def section(name: str, found: BenchResult) -> str:
    versions = ", ".join(
        f"{peer} {number}"
        for peer, number in found.about["versions"].items()
        if number[0].isdigit()
    )
    rows = [tuple(cell.replace("|", "\\|") for cell in as_row(found, row)) for row in found.rows]
    explain = "\n".join(f"- {line}" for line in findings(found)) or "- nothing"
    made = f"`lambdahat {found.about['command']}`, Python {found.about['python']}; {versions}."
    figure = f"![The cost of every task, ours and the peers'](figures/bench-{name}.png)"
    parts = (
        f"### {headline(found)}",
        made,
        figure,
        "Slower than another library, or far above the limit ([why](bench-notes.md)):",
        explain,
        markdown_table(HEADER, rows).rstrip(),
    )
    return "\n\n".join(parts)


def draw(name: str, found: BenchResult) -> None:
    buffer = io.BytesIO()
    plot(found).figure.savefig(buffer, dpi=90, metadata={"Software": None})
    # the default merges two peers'
    few = Image.open(buffer).convert("RGB").quantize(64, Image.Quantize.MAXCOVERAGE)
    few.save(FIGURES / f"bench-{name}.png", optimize=True)


def main() -> None:
    found = {
        path.stem.removeprefix("bench-"): BenchResult.load(path)
        for path in sorted(RESULTS.glob("bench-*.json"))
    }
    for name, result in found.items():
        draw(name, result)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    body = "\n\n".join([BEGIN, *(section(name, result) for name, result in found.items()), END])
    PAGE.write_text(before + body + after, encoding="utf-8")


if __name__ == "__main__":
    main()
