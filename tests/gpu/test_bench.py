"""The benchmark on a GPU, at tiny sizes."""

import math

import pytest
import torch

from lambdahat.bench import Plan, run
from lambdahat.bench.records import OURS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_every_family_that_runs_on_a_gpu():
    found = run(Plan("cuda", peers=False, quick=True))
    ours = [row for row in found.rows if row.by == OURS]
    assert {"HVP", "trace to 1 %", "chain-step", "KFAC step", "NGD step of ten seeds"} <= {
        row.work for row in ours
    }
    assert not [(row.work, row.case, row.note) for row in ours if math.isnan(row.seconds)]
    assert all(row.accurate for row in ours)
