"""Training on a CUDA device: it resumes to the same bits, and no step waits for the device."""

import shutil

import pytest
import torch

from lambdahat.problem import Problem
from lambdahat.training import fit
from lambdahat.training.checkpoints import weights
from lambdahat.training.feeding import Feed
from lambdahat.training.stepping import Stepper, Tally, TrainingSubject
from tests.gpu.waiting import no_waiting
from tests.training.small_runs import TEST, TRAIN, network, same, timeless

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def train(folder, epochs=3, resume=False, precision="float32"):
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = fit(
        Problem(model, "cross_entropy", TRAIN),
        optimizer,
        epochs,
        batch_size=64,
        validation=TEST,
        folder=folder,
        resume=resume,
        checkpoint_steps=2,
        keep=100,
        precision=precision,
    )
    return model, run


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_resumes_bit_for_bit_with_dropout_on_the_device(precision, tmp_path):
    state = torch.cuda.get_rng_state()
    model, run = train(tmp_path / "whole", precision=precision)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    for step in (2, 6, 10):
        shutil.copytree(tmp_path / "whole", tmp_path / f"{step}")
        for path in (tmp_path / f"{step}" / "checkpoints").glob("step-*"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()
        torch.cuda.manual_seed(step)
        again, rows = train(tmp_path / f"{step}", resume=True, precision=precision)
        assert same(
            {k: v.cpu() for k, v in again.state_dict().items()},
            {k: v.cpu() for k, v in model.state_dict().items()},
        )
        assert timeless(rows.history) == timeless(run.history)
    assert all(tensor.device.type == "cpu" for tensor in weights(tmp_path / "whole").values())


def test_no_step_waits_for_the_device():
    model = network().cuda()
    problem = Problem(model, "cross_entropy", TRAIN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    feed = Feed(problem, 64, 1, seed=0)
    stepper = Stepper(
        TrainingSubject(problem),
        optimizer,
        feed,
        precision="float32",
        clip=1.0,
        regularizers=(),
        curvature_samples=None,
    )
    groups, tally = list(feed.epoch(0)), Tally(problem.device)
    assert all(batch.data[0].is_cuda for group in groups for batch in group)
    stepper(groups[0], 0, tally)
    with no_waiting():
        for step, group in enumerate(groups[1:], start=1):
            stepper(group, step, tally)
    assert 0 < tally.read()["loss"] < 10
