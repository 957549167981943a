"""What the NGD paper measures at a point: λ̂ at two temperatures, Tr H, WBIC, losses; and G_n, which it lacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lambdahat._progress import report
from lambdahat.estimators.traces import trace
from lambdahat.experiments.experiment import Row
from lambdahat.experiments.ngd.training import Point, Subject, Way, at_equal_loss
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem
from lambdahat.results import Status
from lambdahat.singular.coefficient import llc
from lambdahat.singular.criteria import bayes_criteria

# column: nβ as ``llc`` names it. Both, because the answer depends on it.
TEMPERATURES = {"llc": "n/log n", "llc_batch": "batch"}
WORDS = {"llc": "nβ = n/ln n", "llc_batch": "nβ = B/ln B"}


def compared(subject: Subject, ways: Sequence[Way], labels: Sequence[Row]) -> list[Row]:
    """Two rows of each run: where it ended (``at`` "end"), and at the highest loss at which any ended ("equal loss").

    A point is measured once: the run that ended highest has the same numbers in both rows.
    """
    rows = []
    for way, label, equal in zip(ways, labels, at_equal_loss(ways), strict=True):
        about = {**label, "optimizer": way.optimizer, "diverged": way.diverged}
        end = measured(subject, way.end)
        other = end if equal is way.end else measured(subject, equal)
        rows += [{**about, "at": "end", **end}, {**about, "at": "equal loss", **other}]
        report("measuring", len(rows) // 2, len(ways))
    return rows


def measured(subject: Subject, point: Point, bayes: bool = False) -> Row:
    """A row of one point.

    ``llc`` and ``llc_batch`` are λ̂ at nβ = n/ln n and B/ln B (Eq. 19) with ``…_stderr`` and ``…_status``;
    ``below_centre`` and ``below_centre_batch`` say NOT_A_MINIMUM: the chain found lower loss than the point's.
    ``wbic`` is n·E[L_n] at β = 1/ln n (Eq. 18). With ``bayes`` also ``g_n`` (Eq. 28), from chains at β = 1.
    """
    problem = subject.problem.at(point.vector)
    held_out = subject.held_out.at(point.vector)
    whole = trace(hessian(problem), seed=subject.seed)
    row: Row = {
        "epoch": point.epoch, "loss": point.loss, "gradient": float(problem.gradient().norm()),
        "norm": float(point.vector.norm()), "validation_loss": float(held_out.loss()),
        "trace": float(whole), "trace_stderr": float(whole.stderr),
    }  # fmt: skip
    for column, nbeta in TEMPERATURES.items():
        row |= _coefficient(problem, subject, column, nbeta)
    return row | (_bayes(problem, held_out, subject) if bayes else {})


def _coefficient(problem: Problem, subject: Subject, column: str, nbeta: str) -> Row:
    found = llc(problem, seed=subject.seed, nbeta=nbeta, **_sampling(problem, subject))
    flag = column.replace("llc", "below_centre")
    row: Row = {
        column: float(found), f"{column}_stderr": float(found.stderr), f"{column}_status": found.status.name,
        flag: found.status is Status.NOT_A_MINIMUM,
    }  # fmt: skip
    if found.wbic is not None:
        row |= {"wbic": float(found.wbic), "wbic_stderr": float(found.wbic.stderr)}
    return row


def _bayes(problem: Problem, held_out: Problem, subject: Subject) -> Row:
    found = bayes_criteria(problem, held_out, seed=subject.seed, **_sampling(problem, subject))
    return {"g_n": float(found.g_n), "g_n_stderr": found.g_n_draws_error, "g_n_status": found.status.name}


def _sampling(problem: Problem, subject: Subject) -> dict[str, Any]:
    """SGLD of fixed length and γ; at most its step is found. The mode is named: timing modes would change the bits."""
    setting = subject.setting
    mode = "auto" if problem.device.type == "cuda" else "sequential"
    return {
        "chains": setting.chains, "draws": setting.draws, "burn_in": setting.burn_in, "kernel": "sgld",
        "batch_size": min(setting.sampled_batch, problem.num_samples), "localization": setting.localization,
        "step_size": setting.step_size, "mode": mode,
    }  # fmt: skip
