"""What the NGD paper measures at a point: λ̂ at two temperatures, Tr H, WBIC, losses; and G_n,
which it lacked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lambdahat._core.progress import report
from lambdahat.estimators import trace
from lambdahat.experiments.kit.cells import Row
from lambdahat.experiments.ngd.training import Point, Subject, Way, at_equal_loss
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem
from lambdahat.results import Status
from lambdahat.singular._llc import default_localization, llc
from lambdahat.singular.bayes import bayes_criteria

# column: nβ as ``llc`` names it. Both, because the answer depends on it.
TEMPERATURES = {"llc": "n/log n", "llc_batch": "batch"}
WORDS = {"llc": "nβ = n/ln n", "llc_batch": "nβ = B/ln B"}
RULE = "_rule"  # ends the columns of λ̂ at the γ of the library's rule


def compared(subject: Subject, ways: Sequence[Way], labels: Sequence[Row]) -> list[Row]:
    """Two rows of each run: where it ended (``at`` "end"), and at the highest loss at which any
    ended ("equal loss").

    A point is measured once: the run that ended highest has the same numbers in both rows.
    """
    rows = []
    gamma = rule_at(subject, ways[0].end)
    for way, label, equal in zip(ways, labels, at_equal_loss(ways), strict=True):
        about = {**label, "optimizer": way.optimizer, "diverged": way.diverged}
        end = measured(subject, way.end, gamma=gamma)
        other = end if equal is way.end else measured(subject, equal, gamma=gamma)
        rows += [{**about, "at": "end", **end}, {**about, "at": "equal loss", **other}]
        report("measuring", len(rows) // 2, len(ways))
    return rows


def rule_at(subject: Subject, point: Point) -> float | None:
    """γ of the library's rule at a point and nβ = n/ln n, for all points of a comparison; None
    where it is not asked.

    λ̂ at different γ cannot be compared.
    """
    if not subject.setting.rule:
        return None
    problem = subject.problem.at(point.vector.to(subject.problem.device))
    return default_localization(problem, problem.num_samples / math.log(problem.num_samples))[0]


def measured(
    subject: Subject, point: Point, bayes: bool = False, gamma: float | None = None
) -> Row:
    """A row of one point.

    ``llc`` and ``llc_batch`` are λ̂ at nβ = n/ln n and B/ln B (Eq. 19) with ``…_stderr`` and
    ``…_status``; ``below_centre`` and ``below_centre_batch`` say NOT_A_MINIMUM: the chain found
    lower loss than the point's. ``wbic`` is n·E[L_n] at β = 1/ln n (Eq. 18). With ``bayes`` also
    ``g_n`` (Eq. 28), from chains at β = 1. With ``gamma`` the same once more at this γ, in columns
    that end in RULE.
    """
    vector = point.vector.to(subject.problem.device)
    problem, held_out = subject.problem.at(vector), subject.held_out.at(vector)
    whole = trace(hessian(problem), seed=subject.seed)
    row: Row = {
        "epoch": point.epoch,
        "loss": point.loss,
        "gradient": float(problem.gradient().norm()),
        "norm": float(vector.norm()),
        "validation_loss": float(held_out.loss()),
        "trace": float(whole),
        "trace_stderr": float(whole.stderr),
    }
    for column, nbeta in TEMPERATURES.items():
        row |= _coefficient(problem, subject, column, nbeta)
        if gamma is not None:
            again = _coefficient(problem, subject, column, nbeta, gamma)
            row |= {f"{name}{RULE}": value for name, value in again.items()} | {"gamma_rule": gamma}
    return row | (_bayes(problem, held_out, subject) if bayes else {})


def _coefficient(
    problem: Problem, subject: Subject, column: str, nbeta: str, gamma: float | None = None
) -> Row:
    settings = _sampling(problem, subject) | ({} if gamma is None else {"localization": gamma})
    if subject.setting.tol is not None and nbeta == "n/log n":
        # the temperature does not depend on it, and the noise of batches does
        settings["batch_size"] = None
    found = llc(problem, seed=subject.seed, nbeta=nbeta, **settings)
    flag = column.replace("llc", "below_centre")
    row: Row = {
        column: float(found),
        f"{column}_stderr": float(found.stderr),
        f"{column}_status": found.status.name,
        flag: found.status is Status.NOT_A_MINIMUM,
    }
    if found.wbic is not None:
        row |= {"wbic": float(found.wbic), "wbic_stderr": float(found.wbic.stderr)}
    return row


def _bayes(problem: Problem, held_out: Problem, subject: Subject) -> Row:
    found = bayes_criteria(problem, held_out, seed=subject.seed, **_sampling(problem, subject))
    return {
        "g_n": float(found.g_n),
        "g_n_stderr": found.g_n_draws_error,
        "g_n_status": found.status.name,
    }


def _sampling(problem: Problem, subject: Subject) -> dict[str, Any]:
    """SGLD of fixed length and γ, of which at most the step is found; or, with a tolerance, what
    ``llc`` chooses.

    The mode is named: timing modes would change the bits.
    """
    setting = subject.setting
    mode = "auto" if problem.device.type == "cuda" else "sequential"
    if setting.tol is not None:
        return {
            "chains": setting.chains,
            "tol": setting.tol,
            "max_gradients": setting.max_gradients,
            "batch_size": min(setting.sampled_batch, problem.num_samples),
            "localization": setting.localization,
        }
    return {
        "chains": setting.chains,
        "draws": setting.draws,
        "burn_in": setting.burn_in,
        "kernel": "sgld",
        "batch_size": min(setting.sampled_batch, problem.num_samples),
        "localization": setting.localization,
        "step_size": setting.step_size,
        "mode": mode,
    }
