"""What every rank measures on the GPU; run by torchrun: ``device_world.py <folder> <backend>``."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lambdahat as lh
from lambdahat._core.rng import generator
from lambdahat.models import mlp


def problem() -> lh.Problem:
    rng = generator(0, "device ranks")
    x, y = (
        torch.randn(300, 8, generator=rng, dtype=torch.float64),
        torch.randint(0, 3, (300,), generator=rng),
    )
    return lh.Problem(mlp([8, 12, 3]).double().cuda(), "cross_entropy", (x.cuda(), y.cuda()))


def measured() -> dict[str, Any]:
    """Trace, diagonal, eigenvalues, spectrum, a product, a gradient and λ̂."""
    here = problem()
    hessian = lh.hessian(here)
    chains = lh.llc(
        here,
        kernel="sgld",
        step_size=1e-4,
        localization=10.0,
        chains=2,
        draws=100,
        burn_in=50,
        batch_size=100,
        seed=0,
    )
    return {
        "gradient": here.gradient().cpu(),
        "loss": torch.tensor(here.loss(), dtype=torch.float64),
        "product": (hessian @ torch.ones(hessian.dim, dtype=torch.float64, device="cuda")).cpu(),
        "eigenvalues": lh.eigenpairs(hessian, k=3, tol=1e-9).values.cpu(),
        "trace": torch.tensor(float(lh.trace(lh.ggn(here), method="exact"))),
        "spectrum": torch.as_tensor(lh.spectrum(hessian, depth=10).nodes),
        "llc": float(chains),
        "llc stderr": float(chains.stderr),
    }


if __name__ == "__main__":
    torch.cuda.set_device(0)
    dist.init_process_group(sys.argv[2], timeout=timedelta(seconds=120))
    ones = torch.ones(3, device="cuda")
    # a process alone sends nothing by itself: this shows that the backend works
    dist.all_reduce(ones)
    assert ones.tolist() == [float(dist.get_world_size())] * 3
    share = problem()
    found = {
        "measured": measured(),
        "size": share.ranks.size,
        "samples": sum(batch.size for _, batch in share.share),
    }
    torch.save(found, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
