"""The mini-batch experiment in tables and rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lambdahat.experiments.minibatch_claims import share_within
from lambdahat.experiments.minibatch_points import ENDS, MODELS, BatchCell, CurvaturePoint
from lambdahat.experiments.reproduction import Table
from lambdahat.results import Estimate

Points = Sequence[CurvaturePoint]

OPERATORS = {"hessian": "Hessian", "ggn": "GGN"}


def flat_rows(points: Points) -> Iterator[dict[str, Any]]:
    """One row for every batch: what it shows and what each model predicts, with error and spread."""
    for point in points:
        for cell in point.cells:
            told = {
                f"{model} {end}{suffix}": value
                for model in cell.predictions
                for end in ENDS
                for suffix, value in (
                    ("", float(cell.predicted(model, end))),
                    (" error", float(cell.predicted(model, end).stderr)),
                    (" spread", cell.spread(model, end)),
                )
            }
            for batch in range(len(cell.measured)):
                seen = {what: float(cell.values(what)[batch]) for what in (*ENDS, "overlaps")}
                where = {"network": point.network, "epoch": point.epoch, "operator": point.operator}
                yield where | {"batch_size": cell.batch_size, "batch": batch} | seen | told


def all_tables(points: Points) -> tuple[Table, ...]:
    """Shares within one and two deviations, λ'₁ and overlaps by batch size, variances, bulks."""
    networks = list(dict.fromkeys(point.network for point in points))
    sizes = [table for name in networks for table in _by_size([p for p in points if p.network == name])]
    return (*_shares(points), *sizes, _through_training(points), _bulks(points))


def _shares(points: Points) -> Iterator[Table]:
    header = ("network, operator", "model", "1 sd predicted", "2 sd", "1 sd measured", "2 sd ", "predicted/measured")
    for end, what in (("largest", "λ'₁"), ("smallest", "λ'_P")):
        rows = []
        for group in _groups(points):
            if end == "smallest" and not any(point.indefinite for point in group):
                continue  # 0 for every batch
            cells = [cell for point in group for cell in point.cells]
            for model in (model for model in MODELS if model in group[0].models):
                shares = [
                    f"{share_within(cells, model, end, times, ruler):.0%}"
                    for ruler in ("predicted", "measured")
                    for times in (1, 2)
                ]
                ratios = [float(cell.predicted(model, end)) / float(cell.mean(end)) for cell in cells]
                rows.append((_name(group[0]), model, *shares, f"{min(ratios):.2f} … {max(ratios):.2f}"))
        title = f"Share of batches whose {what} lies within one and two standard deviations of the prediction"
        if rows:
            yield Table(title, header, tuple(rows))


def _by_size(points: Points) -> Iterator[Table]:
    """λ'₁ and overlap over batch sizes of one network, at its last epoch."""
    models = [model for model in MODELS if model in points[0].models]
    header = ("epoch, operator", "B", "λ₁", "λ'₁ of batches", *models, "overlap of batches", *(f"{m} " for m in models))
    rows = tuple(_size_row(group[-1], cell, models) for group in _groups(points) for cell in group[-1].cells)
    yield Table(f"{points[0].network}: mean ± sd over batches, prediction ± spread of one batch", header, rows)


def _size_row(point: CurvaturePoint, cell: BatchCell, models: list[str]) -> tuple[str, ...]:
    return (
        f"{point.epoch}, {OPERATORS[point.operator]}", f"{cell.batch_size:,}",
        f"{point.largest:.3g}", f"{float(cell.mean('largest')):.3g} ± {cell.deviation('largest'):.2g}",
        *(f"{float(cell.predicted(m, 'largest')):.3g} ± {cell.spread(m, 'largest'):.2g}" for m in models),
        f"{float(cell.mean('overlaps')):.2f} ± {cell.deviation('overlaps'):.2f}",
        *(f"{float(cell.predicted(m, 'overlaps')):.2f}" for m in models),
    )  # fmt: skip


def _through_training(points: Points) -> Table:
    header = ("network, operator", "epoch", "loss", "σ²", "τ²/(Pσ²)", "λ₁", "λ_P", "P", "N")
    rows = tuple(
        (_name(p), str(p.epoch), f"{p.loss:.3g}", _text(p.variance), f"{p.anisotropy:.3g}", f"{p.largest:.3g}",
         f"{p.smallest:.2g}", f"{p.parameters:,}", f"{p.samples:,}")
        for p in points
    )  # fmt: skip
    return Table("Per-element variance and extreme eigenvalues of the full data through training", header, rows)


def _bulks(points: Points) -> Table:
    """Bulk and outliers of the full data and bulks of batches, at the last epoch (Figures 5.2, 5.4, 6.1)."""
    rows = []
    for point in (group[-1] for group in _groups(points)):
        edges = " … ".join(_text(edge) for edge in (point.bulk.lower, point.bulk.upper))
        apart = ", ".join(f"{float(value):.3g}" for value in point.bulk.outliers) or "none surely"
        rows.append((_name(point), str(point.epoch), f"{point.width:.3g}", _text(point.batch_width), edges, apart))
    header = ("network, operator", "epoch", "width", f"width, B = {points[0].batch_size}", "fitted bulk", "outliers")
    title = "Width of the bulk (Ritz weights of 5/P or more), of a batch's bulk; bulk fitted to the full data, outliers"
    return Table(title, header, tuple(rows))


def _groups(points: Points) -> list[list[CurvaturePoint]]:
    keys = dict.fromkeys((point.network, point.operator) for point in points)
    return [[point for point in points if (point.network, point.operator) == key] for key in keys]


def _name(point: CurvaturePoint) -> str:
    return f"{point.network}, {OPERATORS[point.operator]}"


def _text(value: Estimate) -> str:
    return f"{float(value):.3g} ± {float(value.stderr):.1g}" if float(value.stderr) > 0 else f"{float(value):.3g}"
