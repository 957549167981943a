"""Data made from formulas: XOR, XOR detection, synthetic regression, teacher and student."""

import pytest
import torch
from torch import nn

from lambdahat.data import digits_split, synthetic_regression, teacher_student, xor, xord


def test_xor_is_the_product_of_signs():
    x, y = xor()
    assert torch.equal(2 * y - 1, -x.prod(1).long())
    assert len({tuple(point) for point in x.tolist()}) == 4


@pytest.mark.parametrize("seed", range(5))
def test_xord_is_balanced_disjoint_and_labelled_by_its_one_pair(seed):
    split = xord(seed=seed)
    points = torch.cat([x for x, _ in split])
    labels = torch.cat([y for _, y in split])
    assert [tuple(x.shape) for x, _ in split] == [(12, 10), (10, 10)]
    assert [int(y.sum()) for _, y in split] == [6, 5]
    assert len({tuple(point) for point in points.tolist()}) == 22
    differing = (points.view(-1, 5, 2)[..., 0] != points.view(-1, 5, 2)[..., 1]).sum(1)
    assert torch.equal(differing, labels)  # one pair where positive, none where negative


def test_xord_can_use_every_negative_point_and_no_more():
    assert sum(int((y == 0).sum()) for _, y in xord(pairs=3, train=8, test=8)) == 8
    with pytest.raises(
        ValueError, match=r"train \+ test must be at most 16 for 3 pairs, got 18; raise pairs"
    ):
        xord(pairs=3, train=10, test=8)
    with pytest.raises(ValueError, match="train must be even"):
        xord(train=11)


def test_seeds_decide():
    for make in (xord, lambda seed: synthetic_regression(50, 8, seed=seed)):
        assert torch.equal(make(seed=3).train[0], make(seed=3).train[0])
        assert not torch.equal(make(seed=3).train[0], make(seed=4).train[0])


def test_the_synthetic_regression_has_the_variance_of_the_thesis():
    """Var y = M·E[B²]·b²/12 + ½ + σ² = 256/3·1/3 + 1.5 = 29.9; the thesis prints 29.7 and 31.0
    for its draws.
    """
    found = torch.stack(
        [torch.cat([y for _, y in synthetic_regression(seed=seed)]).var() for seed in range(8)]
    )
    spread = found.std() / 8**0.5
    assert abs(float(found.mean()) - 29.94) < 4 * float(spread)
    split = synthetic_regression()
    assert [len(x) for x, _ in split] == [1600, 400]
    assert 0 <= float(split.train[0].min()) < float(split.train[0].max()) <= 2


def test_without_noise_and_wave_a_linear_model_fits_exactly():
    """c → small: sin z = z − z³/6 …, so y is linear in X to third order."""
    (x, y), (x_test, y_test) = synthetic_regression(400, 6, c=1e-3, noise=0.0)
    solution = torch.linalg.lstsq(x.double(), y.double()).solution
    torch.testing.assert_close(x_test.double() @ solution, y_test.double(), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("share", [1e-5, 1 - 1e-5])
def test_no_part_is_empty(share):
    assert sorted(len(x) for x, _ in digits_split(held_out=share)) == [1, 1796]
    assert [len(x) for x, _ in synthetic_regression(2, 3, held_out=share)] == [1, 1]


@pytest.mark.parametrize("name", ["a", "b", "c", "noise"])
def test_factors_are_numbers(name):
    with pytest.raises(ValueError, match=f"{name} must be a finite number, got nan"):
        synthetic_regression(20, 3, **{name: float("nan")})


def test_the_teacher_is_asked_and_left_as_it_was():
    teacher = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    teacher[1].eval()
    split = teacher_student(teacher, inputs=3, train=500, test=100, noise=0.1, seed=1)
    assert [layer.training for layer in teacher.modules()] == [True, True, False, True]
    x, y = split.train
    with torch.no_grad():
        residual = y - teacher.eval()(x.double())
    assert float(residual.std()) == pytest.approx(0.1, rel=0.1)
    assert tuple(split.test[0].shape) == (100, 3)
    assert split.classes == 2
