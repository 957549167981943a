"""Whether numbers are moments of a positive measure at all.

On [−1, 1] with x = cos t the Chebyshev moments μ_k are the Fourier coefficients of a measure on the
circle. They are those of a positive one exactly when the Toeplitz matrix μ_{|i−j|} is positive
semi-definite (Carathéodory, Toeplitz). Levinson's recursion says at which order it stops to be, and
what the orders below had allowed.
"""

from __future__ import annotations

import numpy as np

from lambdahat._core.check import require
from lambdahat.maxent.bases import Array

SIGMAS = 5.0
ROUNDING = 1e-9


def require_feasible(moments: Array, stderr: Array, hint: str = "") -> None:
    """Refuse Chebyshev moments μ_0 … μ_m (μ_0 = 1) that no positive measure on [−1, 1] has, beyond
    their errors.

    Given those of lower order, μ_k lies within E of a centre c: c = −Σ_j a_jμ_{k−j} and E = Σ_j
    a_jμ_j with Levinson's predictor a. Where E vanishes the lower moments are those of at most k
    atoms, and all others follow from them.
    """
    predictor = np.ones(1)
    for order in range(1, len(moments)):
        room = float(predictor @ moments[:order])
        centre = -float(predictor[1:] @ moments[order - 1 : 0 : -1])
        slack = SIGMAS * (stderr[order] + float(np.abs(predictor[1:]) @ stderr[order - 1 : 0 : -1]))
        slack += ROUNDING * float(np.abs(predictor).sum())
        off = abs(float(moments[order]) - centre)
        low, high = max(centre - room, -1.0), min(centre + room, 1.0)
        require(
            off <= room + slack,
            "moments",
            "be those of a positive measure on the bounds",
            f"{moments[order]:.6g} as Chebyshev moment {order}, where those below it allow"
            f" [{low:.6g}, {high:.6g}]",
            "pass bounds that hold the spectrum, and probes all divided by their own zᵀz" + hint,
        )
        if room <= slack:
            return
        reflection = (centre - float(moments[order])) / room
        padded = np.append(predictor, 0.0)
        predictor = padded + reflection * padded[::-1]
