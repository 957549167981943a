"""``lambdahat graph spectrum``, ``clusters``, ``compare`` and ``fit``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lambdahat.cli.exits import OK, code_of, require_writable, say
from lambdahat.cli.measurements import bars
from lambdahat.cli.options import GraphReading, Output
from lambdahat.cli.printing import print_json, print_table
from lambdahat.graphs import (
    Clusters,
    Graph,
    ModelChoice,
    Similarity,
    clusters,
    fit_model,
    graph,
    similarity,
    spectrum,
    which_model,
)
from lambdahat.report.figures import plot, save_figure
from lambdahat.results import Estimate, Result
from lambdahat.results.charts import value_text


def graphs_of(files: Sequence[Path], reading: GraphReading, output: Output) -> Iterator[Graph]:
    """One graph after the other, named by its file, with a number where two files have one name."""
    require_writable(output.out)
    seen: set[str] = set()
    for file in files:
        with bars(output.quiet):
            one = graph(
                file,
                format=reading.format,
                weighted=not reading.unweighted,
                loops=reading.loops,
                duplicates=reading.duplicates,
                directed=reading.directed,
            )
        name, number = one.name, 1
        while name in seen:
            number += 1
            name = f"{one.name}-{number}"
        seen.add(name)
        yield graph(one, loops="keep", name=name)


def write(output: Output, name: str, result: Result) -> None:
    """The result and its figure into the folder, where one was named."""
    if output.out is None:
        return
    result.save(output.out / f"{name}.json")
    drawn = plot(result)
    save_figure(drawn, output.out / f"{name}.png")


def show(
    output: Output,
    document: Any,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
) -> None:
    """The table, or the JSON document."""
    if output.as_json:
        print_json(document)
    elif not output.quiet:
        print_table(header, rows, title)
        output.print_folder()


def run_spectrum(
    files: Sequence[Path], reading: GraphReading, output: Output, **question: Any
) -> int:
    """The entropic spectrum of every file."""
    documents, rows, statuses = [], [], []
    for one in graphs_of(files, reading, output):
        with bars(output.quiet):
            result = spectrum(one, **question)
        write(output, f"spectrum-{one.name}", result)
        statuses.append(result.status)
        about = _about(one)
        low, middle, high = (float(x) for x in result.density.quantile([0.05, 0.5, 0.95]))
        documents.append(
            {
                **about,
                "entropy": result.density.entropy(),
                "quantiles": {"0.05": low, "0.5": middle, "0.95": high},
                "moments": result.moments.values.tolist(),
                "stderr": result.moments.stderr.tolist(),
                "products": result.cost,
                "status": result.status.name,
            }
        )
        rows.append(
            (
                one.name,
                f"{about['nodes']:,}",
                f"{about['edges']:,}",
                f"{about['components']:,}",
                f"{about['isolated']:,}",
                f"{result.density.entropy():.4g}",
                f"{low:.3g}, {middle:.3g}, {high:.3g}",
                f"{result.cost:,}",
                result.status.name,
            )
        )
    header = ["graph", "nodes", "edges", "components", "isolated", "entropy"]
    show(output, documents, [*header, "5, 50, 95 % of λ", "products", "status"], rows)
    return code_of(statuses)


def run_clusters(
    files: Sequence[Path], reading: GraphReading, output: Output, **question: Any
) -> int:
    """The number of clusters of every file."""
    documents, rows, results = [], [], []
    for one in graphs_of(files, reading, output):
        with bars(output.quiet):
            result = clusters(one, **question)
        write(output, f"clusters-{one.name}", result)
        results.append((one.name, result))
        documents.append({**_about(one), **_clusters_document(one, result)})
        gap = f"{result.gaps[0].low:.3g} … {result.gaps[0].high:.3g}" if result.gaps else ""
        known = math.isfinite(result.cut)
        rivals = ", ".join(
            f"{count} ({weight:.0%})" for count, weight in list(result.rivals.items())[1:4]
        )
        rows.append(
            (
                one.name,
                f"{len(one):,}",
                value_text(result) if known else "none",
                f"{result.cut:.3g}" if known else "",
                gap,
                rivals,
                f"{result.components:,}",
                f"{result.cost:,}",
                result.status.name,
            )
        )
    header = "graph | nodes | clusters | λ* | gap | rivals | components | products | status"
    show(output, documents, header.split(" | "), rows)
    for name, result in results:
        if not result.status.ok:
            say(f"{name}: {result.status.name}. {result.status.value}")
    return code_of(result.status for _, result in results)


def run_similarity(
    files: Sequence[Path], reading: GraphReading, output: Output, **question: Any
) -> int:
    """The divergences between the files' spectra."""
    compared = list(graphs_of(files, reading, output))
    with bars(output.quiet):
        result = similarity(compared, **question)
    write(output, "similarity", result)
    order = result.order()
    header = ("", *(result.names[i] for i in order))
    rows = [(result.names[i], *(_divergence(result, i, j) for j in order)) for i in order]
    document = {
        "names": result.names,
        "divergences": result.divergences.tolist(),
        "stderr": result.stderr.tolist(),
        "status": result.status.name,
    }
    show(output, document, header, rows, "symmetric KL divergence between spectra")
    return code_of([result.status])


def run_fit(
    files: Sequence[Path],
    reading: GraphReading,
    output: Output,
    model: str | None,
    **question: int | None,
) -> int:
    """Fit one random model to every file, or all models, and name the nearest."""
    given: Any = {name: value for name, value in question.items() if value is not None}
    documents, rows = [], []
    for one in graphs_of(files, reading, output):
        with bars(output.quiet):
            result = which_model(one, **given) if model is None else fit_model(one, model, **given)
        write(output, f"fit-{one.name}", result)
        for fit in result.fits if isinstance(result, ModelChoice) else (result,):
            documents.append(
                {
                    "name": one.name,
                    "model": fit.model,
                    "parameter": fit.parameter,
                    "value": fit.value,
                    "stderr": fit.stderr,
                    "divergence": fit.divergence,
                    "typical": fit.typical,
                    "size": fit.size,
                    "neighbours": fit.neighbours,
                    "graphs_drawn": fit.cost,
                }
            )
            rows.append(
                (
                    one.name,
                    fit.model,
                    f"{fit.parameter} = {value_text(fit)}",
                    f"{fit.divergence:.4g}",
                    f"{fit.typical:.2g}",
                    f"{fit.size:,}",
                    f"{fit.cost:,}",
                )
            )
    header = ("graph", "model", "parameter", "divergence", "typical", "nodes", "graphs drawn")
    show(output, documents, header, rows)
    return OK


def _about(one: Graph) -> dict[str, Any]:
    return {
        "name": one.name,
        "nodes": len(one),
        "edges": one.num_edges,
        "components": int(one.components.max()) + 1,
        "isolated": int((one.degrees == 0).sum()),
    }


def _clusters_document(one: Graph, result: Clusters) -> dict[str, Any]:
    gaps = [asdict(gap) for gap in result.gaps]
    labels = None
    if result.labels is not None:
        names = range(len(one)) if one.names is None else one.names
        labels = {str(name): int(label) for name, label in zip(names, result.labels, strict=True)}
    return {
        "clusters": result.value,
        "stderr": result.stderr,
        "cut": result.cut,
        "gaps": gaps,
        "products": result.cost,
        "status": result.status.name,
        "labels": labels,
    }


def _divergence(similarity: Similarity, i: int, j: int) -> str:
    if i == j:
        return "0"
    return value_text(
        Estimate(float(similarity.divergences[i, j]), float(similarity.stderr[i, j]))
    ).removesuffix(" (exact)")
