"""What every rank of a world measures, and ranks that end, hang or go another way.

Run by itself, ``world.py <folder>``: every rank is forked from one process that has imported all
there is to import, and writes one file of results. ``measured(...)`` runs in one process too: that
is the reference.
"""

import copy
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import weakref
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import lambdahat as lh
from lambdahat import fsdp
from lambdahat._core.rng import generator
from lambdahat.models import mlp
from lambdahat.problem.distributed import on_one_rank

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.cases import classifier

OPERATORS = {
    "hessian": lh.hessian,
    "ggn": lh.ggn,
    "exact fisher": lh.fisher,
    "empirical fisher": lambda problem: lh.fisher(problem, "empirical"),
    "covariance": lh.gradient_covariance,
}


def data(samples=21, seed=0):
    rng = generator(seed, "ranks")
    return torch.randn(samples, 4, generator=rng, dtype=torch.float64), torch.randint(
        0, 3, (samples,), generator=rng
    )


def norm_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


class Centred(nn.Module):
    """Samples meet in the mean of a layer; with a head of 0 the loss is log 3 whatever they do."""

    def __init__(self, head):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()
        with torch.no_grad():
            self.head.weight.mul_(head)
            self.head.bias.zero_()

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.head(hidden - hidden.mean(0))


class Causal(nn.Module):
    """Each position predicts the next token, as its own loss has it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(7, 4).double(), nn.Linear(4, 7).double()

    def forward(self, input_ids, labels=None):
        logits = self.head(torch.tanh(self.embed(input_ids).cumsum(1)))
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            )
        return found


def contrast(output, target):
    """A loss in which the samples of a batch meet."""
    return (output @ output.T).logsumexp(1).mean() + nn.functional.cross_entropy(output, target)


def ignoring(batch_size=5):
    """Uneven numbers of targets that count, so that shares must be weighted by them."""
    x, y = data(22)
    y[::3], y[:4] = -100, -100
    return lh.Problem(
        mlp([4, 5, 3], seed=1).double(), "cross_entropy", (x, y), batch_size=batch_size
    )


def no_data():
    matrix = torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64))
    return lh.Problem.from_function(
        lambda p: p["w"] @ matrix @ p["w"] / 2, {"w": torch.ones(6).double()}, num_samples=50
    )


PROBLEMS = {
    "cut batches": lambda: classifier(samples=21),
    "fewer samples than ranks": lambda: classifier(samples=3),
    "batches of their own": lambda: lh.Problem(
        norm_network(), "cross_entropy", data(), batch_size=6, norm="train"
    ),
    "a loss that compares samples": lambda: lh.Problem(
        norm_network(), contrast, data(), batch_size=9
    ),
    "samples that meet behind a head of 0": lambda: lh.Problem(
        Centred(0.0), "cross_entropy", data()
    ),
    "targets that do not count": ignoring,
    "running statistics": lambda: lh.Problem(
        norm_network(), "cross_entropy", data(), dtype=torch.float64
    ),
    "no data": no_data,
}


def products(problem):
    """Loss, gradient and Hessian, and for problems of a model and a loss all other matrices."""
    found = {
        "loss": problem.loss(),
        "gradient": problem.gradient(),
        "hessian": lh.hessian(problem).dense(),
    }
    return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in found.items()}


def measured():
    """All that ranks must measure as one process does."""
    out = {
        f"{name}: {key}": value
        for name, make in PROBLEMS.items()
        for key, value in products(make()).items()
    }
    problem = classifier(samples=21)
    out |= {name: make(problem).dense() for name, make in OPERATORS.items()}
    whole = classifier(samples=28)  # four batches of 7, so that none is cut on 1, 2 or 4 ranks
    out["monte carlo fisher"] = lh.fisher(whole, "monte_carlo", samples=2).dense()
    smooth = lh.hessian(classifier((4, 6, 3), "tanh", 21))
    out["trace"] = lh.trace(smooth, tol=0.3, method="hutchinson").value
    out["trace, auto"] = lh.trace(smooth, tol=0.1).value
    out["closed-form trace"] = lh.trace(lh.ggn(problem), method="exact").value
    out["closed-form diagonal"] = lh.ggn(problem).known_diagonal()
    # more than 100 parameters: Lanczos, not the dense matrix
    large = lh.hessian(classifier((6, 12, 3), "tanh", 21))
    pairs = lh.eigenpairs(large, k=3)
    out["eigenvalues"], out["eigenvectors"] = pairs.values, pairs.vectors.abs()
    spectrum = lh.spectrum(large, depth=12)
    out["spectrum nodes"], out["spectrum weights"] = spectrum.nodes, spectrum.weights
    out["landscape"] = lh.landscape(
        problem, lh.eigenpairs(lh.hessian(problem), k=1), points=3, held_out=data(8, 1)
    ).held_out
    return {
        name: torch.as_tensor(value, dtype=torch.float64)
        for name, value in (out | sampled(problem)).items()
    }


def sampled(problem):
    kernel = lh.sampling.sgld(1e-3, 5.0, 10.0)
    averages = {"first": lambda theta: theta[0]}
    chains = lh.sample(
        problem,
        kernel,
        chains=5,
        draws=12,
        burn_in=3,
        batch_size=6,
        baseline="both",
        averages=averages,
        keep_parameters=True,
        mode="sequential",
    )
    # fewer chains than ranks
    lone = lh.sample(problem, kernel, chains=1, draws=4, mode="sequential")
    exact = lh.sample(
        problem, lh.sampling.hmc(1e-2, 5.0, 10.0), chains=3, draws=2, observables={"sum": torch.sum}
    )
    found = lh.llc(
        problem,
        chains=4,
        draws=16,
        burn_in=4,
        step_size=1e-3,
        localization=10.0,
        kernel="sgld",
        batch_size=8,
    )
    return {
        "losses": chains.losses,
        "full losses": chains.full_losses,
        "parameters": chains.parameters,
        "averages": chains.averages["first"],
        "rhat": chains.diagnostics.rhat,
        "acceptance": chains.diagnostics.acceptance,
        "lone chain": lone.losses,
        "exact kernel": exact.losses,
        "observable": exact.observables["sum"],
        "llc": found.value,
        "llc stderr": found.stderr,
        "llc per chain": found.per_chain,
    }


def sent():
    """The bytes of every all-reduce that a call makes."""
    problem, kernel = classifier(samples=21), lh.sampling.sgld(1e-3, 5.0, 10.0)
    operators = {name: make(problem) for name, make in OPERATORS.items()}
    vector, block = (
        torch.ones(problem.num_parameters).double(),
        torch.ones(problem.num_parameters, 3).double(),
    )
    calls = {f"{name} @ v": lambda op=op: op @ vector for name, op in operators.items()}
    calls |= {f"{name} @ V": lambda op=op: op @ block for name, op in operators.items()}
    calls |= {
        "loss": problem.loss,
        "gradient": problem.gradient,
        "diagonal": operators["ggn"].known_diagonal,
    }
    single_precision, large = lh.hessian(single()), lh.hessian(classifier((6, 12, 3), "tanh", 21))
    calls["float32 product"] = lambda: single_precision @ torch.ones(single_precision.dim)
    calls["eigenpairs"] = lambda: lh.eigenpairs(large, 1).cost
    calls["draws"] = lambda: (
        lh.sample(problem, kernel, chains=2, draws=40, batch_size=6, mode="sequential").cost
    )
    calls["problem"], calls["operator"] = (
        lambda: classifier(samples=21),
        lambda: lh.hessian(problem),
    )
    return {name: counted(call) for name, call in calls.items()}


def single():
    x, y = data()
    return lh.Problem(mlp([4, 5, 3], seed=0), "cross_entropy", (x.float(), y))


def counted(call):
    real, seen = dist.all_reduce, []

    def counting(tensor, *args, **kwargs):
        seen.append(tensor.numel() * tensor.element_size())
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        result = call()
    finally:
        dist.all_reduce = real
    return {"bytes": seen, "result": result if isinstance(result, int) else None}


def wrapped():
    """Differences that a model makes when it is wrapped: by DDP, and by FSDP2."""
    plain, x = norm_network(), data()[0]
    plain(x)
    reference = lh.Problem(plain, "cross_entropy", data(), ranks=None)
    ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    sharded = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    kernel, out = lh.sampling.sgld(1e-3, 5.0, 10.0), {}
    for name, model in {"ddp": ddp, "fsdp": sharded}.items():
        problem = lh.Problem(model, "cross_entropy", data())
        out[f"{name} names"] = problem.space.names == reference.space.names
        pairs = zip(products(problem).values(), products(reference).values(), strict=True)
        out[f"{name} products"] = max(float((a - b).abs().max()) for a, b in pairs)
        values = [lh.eigenpairs(lh.hessian(p), k=2).values for p in (problem, reference)]
        out[f"{name} eigenvalues"] = float((values[0] - values[1]).abs().max())
        chains = [
            lh.sample(p, kernel, 2, 5, mode="sequential").losses for p in (problem, reference)
        ]
        out[f"{name} chains"] = float(abs(chains[0] - chains[1]).max())
    out["fsdp still shards"] = (
        type(sharded[0].weight).__name__ == "DTensor" and sharded[0].weight.to_local().numel() < 20
    )
    nn.functional.cross_entropy(sharded(x), data()[1]).backward()  # its hooks are where they were
    out["fsdp trains"] = float(sharded[0].weight.grad.full_tensor().abs().max()) > 0
    return out


def constants():
    """Differences that sharding makes to a problem of which some parameters are held constant,
    in uneven pieces.
    """
    mesh, out = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for samples in (1, 21):  # of one sample, most ranks have none
        plain, model = mlp([4, 5, 3], seed=1).double(), mlp([4, 5, 3], seed=1).double()
        for layer in (model[0], model):
            fully_shard(layer, mesh=mesh)
        settings = {"batch_size": 5, "parameters": "2.*"}
        reference = lh.Problem(plain, "cross_entropy", data(samples), ranks=None, **settings)
        problem = lh.Problem(model, "cross_entropy", data(samples), **settings)
        out[f"{samples}: pieces"] = len(problem.share)
        both = [products(each) for each in (problem, reference)]
        out[f"{samples}: products"] = max(
            float((both[0][key] - both[1][key]).abs().max()) for key in both[0]
        )
        with torch.no_grad():
            model[0].weight.mul_(2.0), plain[0].weight.mul_(2.0)
        out[f"{samples}: trained since"] = abs(problem.loss(reference.vector) - reference.loss())
        kernel = lh.sampling.sgld(1e-3, 5.0, 10.0)
        chains = [
            lh.sample(each, kernel, 3, 4, batch_size=1).losses for each in (problem, reference)
        ]
        out[f"{samples}: chains"] = float(abs(chains[0] - chains[1]).max())
    return out


def sharded():
    """Vectors spread as the parameters are, against the dense matrix of the same model."""
    x, y = data()
    order = torch.cat(
        [torch.arange(11), 11 + torch.randperm(10, generator=generator(dist.get_rank(), "order"))]
    )
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    line = nn.Linear(4, 1).double()
    target = line(x).detach()  # so that the line is the minimum
    models = [copy.deepcopy(model) for model in (plain, line, Centred(0.0))]
    coarse = copy.deepcopy(plain).float()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(models[0][0], mesh=mesh)
    for model in models:
        fully_shard(model, mesh=mesh)
    fully_shard(coarse, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    half = fsdp.ShardedProblem(coarse, "cross_entropy", (x.float(), y))
    tokens = torch.randint(7, (6, 5), generator=generator(0, "tokens"))
    text = {
        "input_ids": tokens,
        "labels": tokens.masked_fill(torch.arange(5) > torch.arange(6)[:, None], -100),
    }
    causal = Causal()
    own_loss = float(causal(**text)["loss"].detach())
    fully_shard(causal, mesh=mesh)
    curved = fsdp.ShardedProblem(models[0], "cross_entropy", (x, y), batch_size=11)
    flat = fsdp.ShardedProblem(models[1], "mse", (x, target), batch_size=21)
    pairs, matrix = fsdp.eigenvalues(curved, k=2, tol=1e-6), dense(plain, "cross_entropy", (x, y))
    image = curved.product(pairs.vectors[:, 0].contiguous())
    miss = image - float(pairs.values[0]) * pairs.vectors[:, 0]
    found = fsdp.llc(
        flat, step_size=0.02, localization=1.0, nbeta=20.0, chains=2, draws=120, burn_in=20
    )
    return {
        "lengths": (len(curved.vector), curved.num_parameters),
        "loss": curved.loss(),
        "trained": models[0].training,
        "causal": fsdp.ShardedProblem(causal, "cross_entropy", text, batch_size=4).loss()
        - own_loss,
        "gradient": float(curved.dots(curved.gradient()[None], curved.gradient())),
        "matrix": matrix,
        "values": pairs.values,
        "miss": float(curved.dots(miss[None], miss)) ** 0.5,
        "status": pairs.status.name,
        "trace": fsdp.trace(curved, tol=0.5),
        "llc": found,
        "offloaded": [offloaded(scale, mesh) for scale in (1.0, 4.0, 16.0)],
        "line": dense(line, "mse", (x, target)),
        "reference": lh.Problem(plain, "cross_entropy", (x, y), ranks=None).gradient(),
        "plain": error_of(lambda: fsdp.ShardedProblem(plain, "cross_entropy", (x, y))),
        "meeting": error_of(lambda: fsdp.ShardedProblem(models[0], contrast, (x, y))),
        "meeting behind 0": error_of(
            lambda: fsdp.ShardedProblem(models[2], "cross_entropy", (x, y))
        ),
        "order": error_of(
            lambda: fsdp.ShardedProblem(
                models[0], "cross_entropy", (x[order], y[order]), batch_size=11
            )
        ),
        "another loss": error_of(
            lambda: fsdp.ShardedProblem(models[0], scaled(dist.get_rank()), (x, y))
        ),
        "seed": error_of(
            lambda: fsdp.llc(flat, step_size=0.02, localization=1.0, draws=8, seed=dist.get_rank())
        ),
        "tol": error_of(lambda: fsdp.trace(flat, tol=0.5 + dist.get_rank())),
        "half": error_of(lambda: fsdp.eigenvalues(half, k=1)),
        "half llc": error_of(
            lambda: fsdp.llc(half, step_size=1e-4, localization=1.0, draws=8, burn_in=0)
        ),
    }


def offloaded(scale, mesh):
    """The largest eigenvalue of a network in float32 with its parameters offloaded, exact and found
    to 1e-3; the larger its weights, the sooner the loss stops being quadratic.
    """
    x, y = data()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    exact = torch.linalg.eigvalsh(
        dense(copy.deepcopy(model).double(), "cross_entropy", (x.double(), y))
    )
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    problem = fsdp.ShardedProblem(model, "cross_entropy", (x.float(), y), vectors="cpu")
    return exact, fsdp.eigenvalues(problem, k=1, tol=1e-3), fsdp.trace(problem, tol=0.5)


def scaled(rank):
    return lambda output, target: (1 + rank) * nn.functional.cross_entropy(output, target)


class Features(nn.Module):
    """Cosines of products with a tensor that is neither parameter nor buffer."""

    def __init__(self, seed):
        super().__init__()
        self.fixed, self.head = (
            torch.randn(4, 8, generator=generator(seed, "features")).double(),
            mlp([8, 3]).double(),
        )

    def forward(self, x, scale=1.0):
        return self.head(torch.cos(torch.nan_to_num(x).double() @ self.fixed)) * scale


def dense(model, loss, on):
    return lh.hessian(lh.Problem(model, loss, on, ranks=None)).dense()


def refusals(rank):
    """What each rank is told where the ranks do not do the same."""
    x, y = data()
    problem = classifier(samples=21)
    order = torch.randperm(len(x), generator=generator(rank, "order"))
    both = lh.hessian(problem), lh.ggn(problem)
    kernel = lh.sampling.sgld(1e-3, 5.0, 10.0)
    v = torch.ones(problem.num_parameters).double()
    own = torch.randn(problem.num_parameters, generator=generator(rank, "own"), dtype=torch.float64)
    trained = mlp([4, 5, 3], seed=1).double()
    later = lh.Problem(trained, "cross_entropy", (x, y))
    with torch.no_grad():
        trained[0].weight.add_(1e-3 * rank)
    holed = torch.where(
        torch.arange(21)[:, None] == 0, torch.nan, x + rank * (torch.arange(21)[:, None] > 5)
    )
    large = (65000 * torch.rand(21, 4, generator=generator(rank, "large"))).half()
    off = {1 + size: v + size * rank * (torch.arange(len(v)) == 5) for size in (1e-9, 0.02)}
    in32, few = single(), {"x": x, "labels": y}
    hessian32 = lh.hessian(in32)
    running = norm_network()
    running[1].running_mean.add_(rank)
    relu = nn.Sequential(
        nn.Linear(4, 5), [nn.Tanh(), nn.ReLU()][rank % 2], nn.Linear(5, 3)
    ).double()
    for tensor in relu.parameters():
        nn.init.constant_(tensor, 0.0)  # so that nothing shows at the parameters themselves
    classes = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0 + rank, 1.0], dtype=torch.float64))
    token = nn.Embedding(3, 5).double()
    nn.init.zeros_(token.weight)
    cases = {
        "another activation": lambda: lh.Problem(relu, "cross_entropy", (x, y)),
        "another plain tensor": lambda: lh.Problem(Features(rank), "cross_entropy", (x, y)),
        "other class weights": lambda: lh.Problem(mlp([4, 5, 3]).double(), classes, (x, y)),
        "another loss of one's own": lambda: lh.Problem(
            mlp([4, 5, 3]).double(), scaled(rank), (x, y)
        ),
        "another function": lambda: lh.Problem.from_function(
            lambda p: (1 + rank) * p["w"].square().sum(), {"w": torch.zeros(4)}
        ),
        "another count": lambda: lh.Problem(
            token,
            "cross_entropy",
            (y.view(7, 3), y.view(7, 3)),
            count=["tokens", "sequences"][rank % 2],
        ),
        "an entry that is no tensor": lambda: lh.Problem(
            Features(0), "cross_entropy", [{**few, "scale": 1.0 + rank}]
        ),
        "data beside a NaN": lambda: lh.Problem(Features(0), "cross_entropy", (holed, y)),
        "large data in half precision": lambda: lh.Problem(
            Features(0), "cross_entropy", (large, y)
        ),
        "running statistics": lambda: lh.Problem(running, "cross_entropy", (x, y)),
        "running statistics that are not read": lambda: lh.Problem(
            running, "cross_entropy", (x, y), batch_size=7, norm="train"
        ).loss(),
        "a vector a little off": lambda: both[0] @ off[1 + 1e-9],
        "a vector in float32 a little off": lambda: hessian32 @ off[1.02].float(),
        "a point a little off": lambda: problem.loss(problem.vector * (1 + 1e-9 * rank)),
        "data of another length": lambda: lh.Problem(
            mlp([4, 5, 3]).double(), "cross_entropy", data(21 - rank)
        ),
        "data in another order": lambda: lh.Problem(
            mlp([4, 5, 3]).double(), "cross_entropy", (x[order], y[order])
        ),
        "another model": lambda: lh.Problem(
            mlp([4, 5, 3], seed=rank).double(), "cross_entropy", (x, y)
        ),
        "another width": lambda: lh.Problem(
            mlp([4, 5 + rank, 3]).double(), "cross_entropy", (x, y)
        ),
        "trained apart since": lambda: lh.hessian(later),
        "another vector": lambda: both[0] @ own,
        "another operator": lambda: both[rank % 2] @ v,
        "another point": lambda: problem.gradient(problem.vector + rank),
        "another seed": lambda: lh.sample(problem, kernel, chains=2, draws=2, seed=rank),
        "another step size": lambda: lh.sample(
            problem, lh.sampling.sgld(1e-3 + rank, 5.0, 10.0), chains=2, draws=2
        ),
        "another seed of a Fisher": lambda: lh.fisher(problem, "monte_carlo", seed=rank),
    }
    return {name: error_of(case) for name, case in cases.items()}


def error_of(call):
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return ""


def groups():
    """A problem for some ranks, and one for this process alone."""
    some = dist.new_group([0, 1])
    out = {"alone": lh.Problem(mlp([4, 3]).double(), "cross_entropy", data(), ranks=None).loss()}
    if dist.get_rank() == 0:  # as the callbacks of trainers do
        with on_one_rank():
            out["callback"] = lh.Problem(mlp([4, 3]).double(), "cross_entropy", data()).loss()
    if dist.get_rank() < 2:
        problem = lh.Problem(mlp([4, 3]).double(), "cross_entropy", data(), ranks=some)
        out |= {"loss": problem.loss(), "share": len(problem.share), "size": problem.ranks.size}
    else:
        out["outside"] = error_of(
            lambda: lh.Problem(mlp([4, 3]).double(), "cross_entropy", data(), ranks=some)
        )
    return out


@contextmanager
def world(seconds=300):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    yield dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()


def rank_of_a_world(folder):
    with world() as (rank, size):
        found = {"measured": measured(), "sent": sent()}
        if size == 2:
            cut = lh.fisher(classifier(samples=21), "monte_carlo", samples=300)
            found |= {"sharded": sharded(), "drawn trace": cut.known_trace()}
        if size == 4:
            found |= {
                "wrapped": wrapped(),
                "refusals": refusals(rank),
                "groups": groups(),
                "constants": constants(),
            }
        kept, group = classifier(samples=21), weakref.ref(dist.group.WORLD)
    gc.collect()
    found |= {"group ended": group() is None, "after the end": error_of(lambda: kept.ranks.group)}
    torch.save(found, folder / f"{size}-{rank}.pt")


def failing_rank(folder):
    """Ranks that end, hang or go another way, in three groups of one world of four.

    Each rank that comes back writes what it was told to ``<group>-<rank>.txt``.
    """
    limit, longer = timedelta(seconds=20), timedelta(seconds=200)

    def operator(group):
        return lh.hessian(classifier(samples=21, ranks=group))

    def told(name, text):
        (folder / f"{name}-{rank}.txt").write_text(text, encoding="utf-8")

    def multiply(op, columns):
        block = torch.ones(op.dim, columns).double()
        for _ in range(3):
            op @ block

    dist.init_process_group("gloo", timeout=longer)
    rank = dist.get_rank()
    ended, hung = (dist.new_group(pair, timeout=limit) for pair in ([0, 1], [2, 3]))
    apart = dist.new_group([0, 2], timeout=longer)
    dist.barrier()
    op = operator(ended if rank < 2 else hung)
    multiply(op, 1)
    if rank == 1:
        os._exit(3)
    if rank == 3:
        time.sleep(300)
    told("ended" if rank == 0 else "hung", error_of(lambda: multiply(op, 1)))
    op = operator(apart)
    told("apart", error_of(lambda: multiply(op, 1 + rank)) or "no error")


def forked(size, call, folder):
    """The process ids of the ranks of a world, each of which makes the call and ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(size))
    started = []
    for rank in range(size):
        started.append(os.fork())
        if not started[-1]:
            os.environ["RANK"] = str(rank)
            call(folder)
            sys.exit()  # not os._exit: a group that outlives Python's end aborts the process
    return started


def exit_codes(processes):
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]


def main(folder, sizes=(1, 2, 4)):
    """Worlds one after another; beside them the ranks that fail, which wait most of the time."""
    torch.set_num_threads(1)
    for name in ("arviz_stats.base", "torch._dynamo"):  # what every rank would import on its way
        importlib.import_module(name)
    # else every rank searches, and thereby copies, all that was imported when it looks for garbage
    gc.collect()
    gc.freeze()
    *failing, hung = forked(4, failing_rank, folder)
    codes = {str(size): exit_codes(forked(size, rank_of_a_world, folder)) for size in sizes}
    codes["failing"] = exit_codes(failing)
    os.kill(hung, signal.SIGKILL)
    (folder / "exit-codes.json").write_text(json.dumps(codes), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
