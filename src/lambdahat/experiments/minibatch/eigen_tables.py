"""The mini-batch experiment in tables and charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import Table, mean_of
from lambdahat.experiments.minibatch.eigen_claims import share_within
from lambdahat.experiments.minibatch.eigen_rows import Batches, Point, groups_of
from lambdahat.results.charts import Chart, Series

Groups = Sequence[Sequence[Point]]


def tables(rows: Rows) -> list[Table]:
    """Shares within one and two deviations, λ'₁ and overlaps by batch size, variances, bulks."""
    groups = groups_of(rows)
    return [*_shares(groups), *_by_size(groups), _through_training(groups), _bulks(groups)]


def _shares(groups: Groups) -> Iterator[Table]:
    header = (
        "network, operator",
        "model",
        "1 sd predicted",
        "2 sd",
        "1 sd measured",
        "2 sd ",
        "predicted/measured",
    )
    for end, what in (("largest", "λ'₁"), ("smallest", "λ'_P")):
        lines = []
        for group in groups:
            if end == "smallest" and not any(point["indefinite"] for point in group):
                continue  # 0 for every batch
            every = [batches for point in group for batches in point.batches]
            lines += [
                (group[0].name, model, *_share(every, model, end)) for model in group[0].models
            ]
        if lines:
            title = (
                f"Share of batches whose {what} lies within one and two standard deviations of the"
                " prediction"
            )
            yield Table(title, header, tuple(lines))


def _share(every: Sequence[Batches], model: str, end: str) -> tuple[str, ...]:
    rulers = [(ruler, times) for ruler in ("predicted", "measured") for times in (1, 2)]
    shares = [f"{share_within(every, model, end, times, ruler):.0%}" for ruler, times in rulers]
    ratios = [each.told(model, end).value / each.mean(end).value for each in every]
    # a model that is never below 0 has no λ'_P to compare
    return (*shares, f"{min(ratios):.2f} … {max(ratios):.2f}" if max(ratios) > 0 else "none")


def _by_size(groups: Groups) -> Iterator[Table]:
    """λ'₁ and overlap over batch sizes at the last epoch, a table for each network."""
    for network in dict.fromkeys(group[0]["network"] for group in groups):
        last = [group[-1] for group in groups if group[0]["network"] == network]
        models = last[0].models
        header = (
            "epoch, operator",
            "B",
            "λ₁",
            "λ'₁ of batches",
            *models,
            "overlap of batches",
            *(f"{model} " for model in models),
        )
        lines = tuple(
            _size_line(point, batches, models) for point in last for batches in point.batches
        )
        yield Table(
            f"{network}: mean ± sd over batches, prediction ± spread of one batch", header, lines
        )


def _size_line(point: Point, batches: Batches, models: list[str]) -> tuple[str, ...]:
    return (
        f"{point['epoch']}, {point['operator']}",
        f"{batches.size:,}",
        f"{point['full largest']:.3g}",
        f"{batches.mean('largest').value:.3g} ± {batches.deviation('largest'):.2g}",
        *(
            f"{batches.told(m, 'largest').value:.3g} ± {batches.spread(m, 'largest'):.2g}"
            for m in models
        ),
        f"{batches.mean('overlaps').value:.2f} ± {batches.deviation('overlaps'):.2f}",
        *(f"{batches.told(m, 'overlaps').value:.2f}" for m in models),
    )


def _through_training(groups: Groups) -> Table:
    header = ("network, operator", "epoch", "loss", "σ²", "τ²/(Pσ²)", "λ₁", "λ_P", "P", "N")
    lines = tuple(
        (
            p.name,
            str(p["epoch"]),
            f"{p['loss']:.3g}",
            _text(p["variance"], p["variance error"]),
            f"{p['anisotropy']:.3g}",
            f"{p['full largest']:.3g}",
            f"{p['full smallest']:.2g}",
            f"{p['parameters']:,}",
            f"{p['population']:,}",
        )
        for group in groups
        for p in group
    )
    return Table(
        "Per-element variance and extreme eigenvalues of the full data through training",
        header,
        lines,
    )


def _bulks(groups: Groups) -> Table:
    """Bulk and outliers of the full data and bulks of batches, at the last epoch (Figures 5.2,
    5.4, 6.1).
    """
    lines = []
    for point in (group[-1] for group in groups):
        edges = " … ".join(
            _text(*edge) for edge in zip(point["bulk"], point["bulk errors"], strict=True)
        )
        apart = ", ".join(f"{value:.3g}" for value in point["outliers"]) or "none surely"
        width = mean_of(point["batch widths"])
        lines.append(
            (
                point.name,
                str(point["epoch"]),
                f"{point['width']:.3g}",
                _text(width.value, width.stderr),
                edges,
                apart,
            )
        )
    header = (
        "network, operator",
        "epoch",
        "width",
        f"width, B = {groups[0][-1]['width size']}",
        "fitted bulk",
        "outliers",
    )
    title = (
        "Width of the bulk (Ritz weights of 5/P or more), of a batch's bulk; bulk fitted to the"
        " full data, outliers"
    )
    return Table(title, header, tuple(lines))


def _text(value: float, error: float) -> str:
    return f"{value:.3g} ± {error:.1g}" if error > 0 else f"{value:.3g}"


def charts(rows: Rows) -> list[Chart]:
    """For each network and operator λ'₁ and overlaps over batch sizes and two spectra; σ²
    through training for all.
    """
    groups = groups_of(rows)
    out = [chart for group in groups for chart in _point_charts(group[-1])]
    variances = tuple(
        Series(
            group[0].name,
            [p["epoch"] for p in group],
            [p["variance"] for p in group],
            [p["variance error"] for p in group],
        )
        for group in groups
    )
    out.append(
        Chart(
            "Variance of an element of the curvature",
            "epoch",
            "σ²",
            variances,
            y_log=True,
            source="Figure 5.5",
        )
    )
    return out


def _point_charts(point: Point) -> list[Chart]:
    where = f"{point.name}, epoch {point['epoch']}"
    ends = (
        ("largest", "λ'₁", "Figure 5.6", (("full data", float(point["full largest"])),)),
        ("overlaps", "(φ̂₁ᵀφ₁)²", "Theorem 17", ()),
    )
    out = [
        Chart(
            f"{where}: {label} of a batch",
            "batch size B",
            label,
            _over_sizes(point, what),
            x_log=True,
            y_log=what == "largest",
            source=source,
            lines=lines,
            caption=(
                "Batches: mean and standard deviation between them; models: spread or error of the"
                " prediction."
            ),
        )
        for what, label, source, lines in ends
    ]
    spectra = (
        Series(
            f"batch of {point['width size']}",
            point["batch nodes"],
            point["batch weights"],
            style="stems",
        ),
        Series("full data", point["nodes"], point["weights"], style="stems"),
    )
    out.append(
        Chart(
            f"{where}: spectrum",
            "eigenvalue",
            "share of eigenvalues",
            spectra,
            y_log=True,
            source="Figures 5.2, 5.4, 6.1",
        )
    )
    return out


def _over_sizes(point: Point, what: str) -> tuple[Series, ...]:
    sizes = [batches.size for batches in point.batches]
    seen = Series(
        "batches",
        sizes,
        [each.mean(what).value for each in point.batches],
        [each.deviation(what) for each in point.batches],
        "points",
    )
    told = [
        Series(
            model,
            sizes,
            [each.told(model, what).value for each in point.batches],
            [
                each.spread(model, what) if what == "largest" else each.told(model, what).stderr
                for each in point.batches
            ],
        )
        for model in point.models
    ]
    return (seen, *told)
