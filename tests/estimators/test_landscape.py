"""Losses along lines and planes, against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lambdahat._core.progress import progress
from lambdahat.estimators import landscape, random_direction, towards
from lambdahat.problem import Problem
from lambdahat.results import Eigenpairs, Landscape
from tests.cases import classifier, quadratic
from tests.oracles import dense_hessian

A = torch.diag(torch.tensor([5.0, 2.0, -1.0], dtype=torch.float64))
B = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)


def test_a_line_of_a_quadratic_is_its_parabola() -> None:
    v = torch.tensor([1.0, 2.0, -2.0], dtype=torch.float64)
    found = landscape(quadratic(A, B), v, distance=0.5, points=7)
    assert found.offsets.tolist() == pytest.approx(np.linspace(-0.5, 0.5, 7).tolist())
    curvature = float(v @ A @ v)
    assert found.curvature == pytest.approx((curvature,), rel=1e-12)
    parabola = float(B @ v) * found.offsets + 0.5 * curvature * found.offsets**2
    np.testing.assert_allclose(found.loss, parabola, rtol=0, atol=1e-12)
    assert found.cost == 7 + 1
    assert found.held_out is None


def test_a_plane_has_one_axis_for_each_direction() -> None:
    v, w = torch.eye(3, dtype=torch.float64)[:2]
    both = [
        landscape(quadratic(A, B), directions, points=5)
        for directions in ([v, w], torch.stack([v, w], dim=1))
    ]
    t, s = np.meshgrid(both[0].offsets, both[0].offsets, indexing="ij")
    expected = 2.5 * t**2 + s**2 + 0.3 * t - 0.2 * s
    for found in both:
        np.testing.assert_allclose(found.loss, expected, atol=1e-12)
        assert found.curvature == pytest.approx((5.0, 2.0))
        assert len(found.labels) == 2


def test_two_directions_of_one_kind_have_names_of_their_own() -> None:
    assert landscape(quadratic(A), ["random", "random"], points=2).labels == (
        "a random direction",
        "another random direction",
    )


def test_eigenpairs_give_their_first_vector() -> None:
    vectors = torch.eye(3, dtype=torch.float64)[:, [0, 2]]
    values = torch.tensor([5.0, -1.0], dtype=torch.float64)
    pairs = Eigenpairs(values, vectors, torch.zeros(2), torch.ones(2, dtype=torch.bool))
    found = landscape(quadratic(A), pairs, points=3)
    assert found.curvature == pytest.approx((5.0,))
    assert "λ = 5" in found.labels[0]
    plane = landscape(quadratic(A), pairs.vectors, points=3)
    assert plane.curvature == pytest.approx((5.0, -1.0))


def test_between_two_checkpoints_the_ends_are_their_losses() -> None:
    first, second = classifier(seed=0), classifier(seed=0).at(classifier(seed=1).vector)
    line = landscape(first, towards(first, second), distance=(0.0, 1.0), points=4)
    assert line.offsets.tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert line.loss[0] == pytest.approx(first.loss(), rel=1e-12)
    assert line.loss[-1] == pytest.approx(second.loss(), rel=1e-12)
    assert (
        landscape(first, towards(first, second.vector), (0, 1), 4).loss.tolist()
        == line.loss.tolist()
    )


def test_filter_normalised_directions_have_the_norms_of_the_parameters() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2)
    ).double()
    problem = Problem(
        model, "cross_entropy", (torch.ones(4, 1, 3, 3), torch.arange(4) % 2), dtype=torch.float64
    )
    direction = problem.space.unflatten(random_direction(problem))
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            norms = direction[name].flatten(1).norm(dim=1)
            torch.testing.assert_close(
                norms, parameter.detach().flatten(1).norm(dim=1), rtol=1e-12, atol=0
            )
        else:
            assert not direction[name].any(), name
    plain = random_direction(problem, filters=False)
    assert float(plain.norm()) == pytest.approx(1.0)
    assert float(random_direction(problem, seed=1, filters=False) @ plain) != pytest.approx(
        1.0, abs=0.5
    )


def test_filter_normalised_losses_do_not_see_the_scale_of_layers() -> None:
    problem = classifier()
    scaled = problem.at(rescaled(problem, 4.0))
    one, other = (landscape(p, "filter", points=5) for p in (problem, scaled))
    np.testing.assert_allclose(one.loss, other.loss, rtol=1e-10)
    plain, moved = (landscape(p, "random", points=5) for p in (problem, scaled))
    assert np.abs(plain.loss - moved.loss).max() > 1e-3


def rescaled(problem: Problem, c: float) -> Tensor:
    """First layer times c, second divided by c: the same function of a ReLU network without a
    first bias.
    """
    parts = {name: t.clone() for name, t in problem.space.unflatten(problem.vector).items()}
    parts["0.weight"] *= c
    parts["0.bias"] *= c
    parts["2.weight"] /= c
    return problem.space.flatten(parts)


def test_the_two_directions_of_a_plane_differ_and_follow_the_seed() -> None:
    problem = classifier()
    plane = landscape(problem, ["random", "random"], points=3)
    assert plane.curvature[0] != plane.curvature[1]
    again = landscape(problem, ["random", "random"], points=3, seed=0)
    other = landscape(problem, ["random", "random"], points=3, seed=1)
    assert again.loss.tolist() == plane.loss.tolist() != other.loss.tolist()


def test_held_out_data_is_measured_at_the_same_points() -> None:
    problem = classifier()
    x, y = (
        torch.randn(9, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64),
        torch.arange(9) % 3,
    )
    by_data = landscape(problem, "random", points=3, held_out=(x, y))
    by_problem = landscape(problem, "random", points=3, held_out=problem.on((x, y)))
    direction = random_direction(problem, 0, "direction 0", filters=False)
    expected = [
        problem.on((x, y)).loss(problem.vector + t * direction) for t in by_data.offsets.tolist()
    ]
    assert by_data.held_out is not None
    assert by_problem.held_out is not None
    assert by_data.held_out.tolist() == pytest.approx(expected, rel=1e-12)
    assert by_problem.held_out.tolist() == by_data.held_out.tolist()
    v = direction
    assert by_data.curvature[0] == pytest.approx(float(v @ dense_hessian(problem) @ v), rel=1e-9)


def test_batch_norm_statistics_follow_the_point_when_asked() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)
        ).double()
        x, y = torch.randn(12, 4).double(), torch.arange(12) % 3
        test = torch.randn(5, 4).double(), torch.arange(5) % 3
    problem = Problem(model, "cross_entropy", (x, y))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = landscape(problem, "random", points=3, held_out=test, refresh=True)
    stale = landscape(problem, "random", points=3, held_out=test)
    direction = random_direction(problem, 0, "direction 0", filters=False)
    for i, offset in enumerate(found.offsets.tolist()):
        here = problem.at(problem.vector + offset * direction).refresh_statistics()
        assert found.loss[i] == pytest.approx(here.loss(), rel=1e-12)
        assert found.held_out is not None
        assert found.held_out[i] == pytest.approx(here.on(test).loss(), rel=1e-12)
    assert np.abs(found.loss - stale.loss).max() > 1e-6
    assert found.curvature == ()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_progress_counts_points_and_the_result_saves(tmp_path: object) -> None:
    seen: list[tuple[str, int, int | None]] = []
    with progress(lambda *args: seen.append(args)):
        found = landscape(quadratic(A), ["random", "random"], points=3, labels=("v", "w"))
    assert [entry for entry in seen if entry[0] == "landscape"] == [
        ("landscape", i, 9) for i in range(1, 10)
    ]
    loaded = Landscape.load(found.save(f"{tmp_path}/line"))
    assert loaded.loss.tolist() == found.loss.tolist()
    assert loaded.labels == ("v", "w")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"directions": torch.ones(2)}, r"directions must have shape \(3,\)"),
        ({"directions": torch.zeros(3)}, "finite and not zero"),
        ({"directions": torch.eye(3)}, "one .a line. or two"),
        ({"directions": "steepest"}, "'random', 'filter'"),
        ({"directions": "filter"}, "weight of two dimensions"),
        ({"directions": "random", "points": 1}, "points must be an integer of at least 2"),
        ({"directions": "random", "distance": -1.0}, "distance must be a finite number above 0"),
        ({"directions": "random", "distance": (1.0, 0.0)}, "low, high"),
        ({"directions": "random", "labels": ("a", "b")}, "labels must have 1"),
    ],
)
def test_refusals(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        landscape(quadratic(A), **arguments)  # type: ignore[arg-type]
