"""What trackers measure along training against dense float64 answers, and that they change
nothing.
"""

import math

import pytest
import torch
from torch import nn

import lambdahat as lh
from lambdahat.training import TRACKERS, Tracker, make_tracker, make_trackers
from lambdahat.training.checkpoints import pack, unpack
from lambdahat.training.curvature_trackers import subspace_drift
from lambdahat.training.scale_trackers import LearningCoefficientTracker
from tests.cases import classifier, quadratic, with_eigenvalues
from tests.oracles import dense_hessian

KINDS = ("trace", "spectrum", "top", "edge", "variance", "norms", "effective_rate")
LLC = {"chains": 2, "max_gradients": 800}
GIVEN = {"step_size": 1e-4, "draws": 20, "burn_in": 5}  # a step that need not be looked for
SETTINGS = {"top": {"k": 3}, "llc": {**LLC, "settings": GIVEN}}


def steps_of(problem, optimizer, count):
    """Full-batch training, one step at a time."""
    for step in range(1, count + 1):
        optimizer.zero_grad()
        named = dict(problem.model.named_parameters())
        sum(
            weight * problem.batch_loss(named, batch) for weight, batch in problem.weighted()
        ).backward()
        optimizer.step()
        yield step


def small(activation="tanh"):
    problem = classifier((4, 6, 3), activation, samples=40, batch_size=None)
    return problem, torch.optim.SGD(problem.model.parameters(), lr=0.5)


def test_curvature_along_training_is_that_of_the_dense_hessian():
    problem, optimizer = small()
    trace, spectrum, top, edge = (
        make_tracker(name, samples=None, **SETTINGS.get(name, {}))
        for name in ("trace", "spectrum", "top", "edge")
    )
    before = None
    for step in steps_of(problem, optimizer, 4):
        values, vectors = torch.linalg.eigh(dense_hessian(problem))
        gradient = problem.gradient()
        scale = float(values.abs().max())
        row = {
            key: value
            for tracker in (trace, spectrum, top, edge)
            for key, value in tracker.measure(problem, optimizer, 0, step).items()
        }
        assert {row[f"{name}_status"] for name in ("trace", "spectrum", "top", "edge")} == {
            "CONVERGED"
        }
        assert row["trace"] == pytest.approx(
            float(values.sum()), abs=5 * row["trace_stderr"] + 1e-9
        )
        assert row["spectrum_largest"] == pytest.approx(float(values[-1]), abs=3e-3 * scale)
        assert row["spectrum_smallest"] == pytest.approx(float(values[0]), abs=3e-3 * scale)
        assert row["edge"] == pytest.approx(0.5 * float(values[-1]), rel=3e-3)
        for i in range(3):
            assert row[f"top_{i + 1}"] == pytest.approx(float(values[-1 - i]), abs=3e-3 * scale)
        span = vectors[:, -3:]
        share = float((span.T @ gradient).square().sum() / gradient.square().sum())
        assert row["top_overlap"] == pytest.approx(share, abs=0.02)
        if before is None:
            assert math.isnan(row["top_drift"])
        else:
            assert row["top_drift"] == pytest.approx(
                1 - float((before.T @ span).square().sum()) / 3, abs=0.02
            )
        before = span


def test_degeneracy_is_the_share_of_eigenvalues_at_zero():
    values = torch.cat([torch.zeros(60), torch.linspace(1, 4, 40)])
    problem = quadratic(with_eigenvalues(values), theta=torch.ones(100, dtype=torch.float64))
    row = make_tracker("degeneracy", depth=60).measure(problem)
    assert row["spectrum_degeneracy"] == pytest.approx(
        0.6, abs=4 * row["spectrum_degeneracy_stderr"]
    )
    assert row["spectrum_degeneracy_stderr"] < 0.15


def test_the_edge_of_a_quadratic_is_rate_times_largest_eigenvalue():
    theta = nn.Parameter(torch.ones(6, dtype=torch.float64))
    matrix = with_eigenvalues([7.0, 3.0, 1.0, 0.0, -1.0, -2.0])
    problem = lh.Problem.from_function(
        lambda p: 0.5 * p["theta"] @ matrix @ p["theta"], {"theta": theta}
    )
    optimizer = torch.optim.SGD([theta], lr=0.3, momentum=0.9)
    row = make_tracker("edge").measure(problem, optimizer)
    assert row["edge"] == pytest.approx(2.1, rel=1e-9)
    assert row["edge_threshold"] == pytest.approx(3.8)


def test_drift_of_a_known_rotation():
    """Two planes of R⁴ with principal angles a and b: 1 − (cos²a + cos²b)/2."""
    a, b = 0.3, 1.1
    before = torch.eye(4, dtype=torch.float64)[:, :2]
    turned = [[math.cos(a), 0, math.sin(a), 0], [0, math.cos(b), 0, math.sin(b)]]
    now = torch.tensor(turned, dtype=torch.float64).T
    expected = 1 - (math.cos(a) ** 2 + math.cos(b) ** 2) / 2
    assert subspace_drift(before, now) == pytest.approx(expected, rel=1e-12)
    # the same plane in another basis
    mixed = now @ torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    assert subspace_drift(before, mixed) == pytest.approx(expected, rel=1e-12)
    assert subspace_drift(before, before) == 0.0
    assert subspace_drift(before, torch.eye(4, dtype=torch.float64)[:, 2:]) == 1.0


def test_the_top_tracker_sees_a_rotation_of_its_problem():
    """The Hessian's leading eigenvector turns by an angle; the columns say so."""
    angle = {"now": 0.0}

    def loss(p):
        c, s = math.cos(angle["now"]), math.sin(angle["now"])
        x, y, *_ = p["theta"]
        return (
            5.0 * (c * x + s * y) ** 2
            + 0.5 * (s * x - c * y) ** 2
            + 0.1 * (p["theta"][2:] ** 2).sum()
        )

    theta = torch.ones(8, dtype=torch.float64)
    tracker = make_tracker("drift", k=1, tol=1e-10)
    tracker.measure(lh.Problem.from_function(loss, {"theta": theta}))
    angle["now"] = 0.4
    row = tracker.measure(lh.Problem.from_function(loss, {"theta": theta}))
    assert row["top_1"] == pytest.approx(10.0, rel=1e-8)
    assert row["top_drift"] == pytest.approx(math.sin(0.4) ** 2, rel=1e-6)


def test_sizes_are_what_they_are_called():
    problem, optimizer = small()
    theta, gradient = problem.vector, problem.gradient()
    row = make_tracker("norms", samples=None).measure(problem)
    assert row["norms_l2"] == pytest.approx(float(theta.norm()))
    assert row["norms_linf"] == pytest.approx(float(theta.abs().max()))
    assert row["norms_gradient"] == pytest.approx(float(gradient.norm()))
    row = make_tracker("effective_rate").measure(problem, optimizer)
    assert row["effective_rate"] == pytest.approx(0.5 / float(theta.square().sum()))
    exact = lh.variance(problem, probes=problem.num_parameters)
    row = make_tracker("variance", samples=None, probes=problem.num_parameters).measure(problem)
    for name in ("gradient", "hessian", "ggn"):
        assert row[f"variance_{name}"] == pytest.approx(
            float(getattr(exact, f"{name}_variance")), rel=1e-9
        )


def test_the_learning_coefficient_is_that_along_checkpoints():
    """The second measurement keeps γ, as ``llc_along`` does, and every row says which γ and nβ."""
    problem, optimizer = small()
    tracker = LearningCoefficientTracker(samples=30, **SETTINGS["llc"])
    sample, points, rows = tracker.sample_of(problem), [], []
    for _ in steps_of(problem, optimizer, 2):
        rows.append(tracker.measure(problem, optimizer))
        points.append(problem.vector)
    along = lh.singular.llc_along(sample, points, **LLC, **GIVEN)
    assert [row["llc"] for row in rows] == [float(result) for result in along.results]
    assert rows[1]["wbic"] == float(along.results[1].wbic)
    assert rows[1]["llc_cost"] == along.results[1].cost
    assert [row["llc_localization"] for row in rows] == [along.localization] * 2
    assert [row["llc_nbeta"] for row in rows] == [along.nbeta] * 2


def test_all_measure_on_one_fixed_sample():
    problem, optimizer = small()
    samples = [make_tracker(name, samples=12, seed=3).sample_of(problem) for name in KINDS]
    expected = problem.subsample(12, 3).batches.first().data
    for sample in samples:
        assert sample.num_samples == 12
        assert all(
            torch.equal(a, b) for a, b in zip(sample.batches.first().data, expected, strict=True)
        )
    tracker = make_tracker("norms", samples=12, seed=3)
    first = tracker.sample_of(problem)
    for _ in steps_of(problem, optimizer, 2):
        row = tracker.measure(problem)
        assert tracker.sample_of(problem) is first
        assert row["norms_gradient"] == pytest.approx(
            float(problem.subsample(12, 3).gradient().norm())
        )
    other = make_tracker("norms", samples=12, seed=4).sample_of(problem).batches.first().data
    assert not torch.equal(other[0], expected[0])


@pytest.mark.parametrize("name", [*KINDS, "llc"])
def test_costs_are_what_was_said(name):
    for activation in ("tanh", "relu"):
        problem, optimizer = small(activation)
        settings = LLC if name == "llc" else SETTINGS.get(name, {})
        tracker = make_tracker(name, samples=30, **settings)
        told = tracker.cost(problem)
        assert told.samples == 30
        row = tracker.measure(problem, optimizer)
        assert told.fewest <= row[f"{name}_cost"] <= told.most, (told, row)
    assert "30 samples" in str(told)


@pytest.mark.parametrize("name", ["spectrum", "top", "edge"])
def test_the_second_measurement_takes_fewer_products_than_a_cold_one(name):
    problem = classifier((10, 30, 5), "tanh", samples=60, batch_size=None)
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.05)
    warm, cold = make_tracker(name), 0.0
    spent = 0.0
    for step in steps_of(problem, optimizer, 5):
        row = warm.measure(problem, optimizer)
        if step > 1:
            spent += row[f"{name}_cost"]
            cold += make_tracker(name).measure(problem, optimizer)[f"{name}_cost"]
    assert spent < 0.9 * cold


class BatchNormNet(nn.Module):
    """Batch norm, dropout and a generator shared with everybody: what careless measuring would
    disturb.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
        )

    def forward(self, x):
        return self.layers(x)


def run(trackers, context):
    """Three steps with dropout and batch norm; everything a run leaves behind."""
    model = BatchNormNet()
    x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))
    problem = lh.Problem(model, "cross_entropy", (x, y))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rows = []
    for step in range(3):
        model.train()
        chosen = torch.randperm(64)[:16]
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        with context():
            rows += [
                tracker.measure(problem, optimizer, 0, step)
                for tracker in trackers
                if step % tracker.every == 0
            ]
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    return state, grads, modes, torch.get_rng_state(), optimizer.state_dict(), rows


CONTEXTS = {
    "plain": torch.enable_grad,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_tracked_run_is_the_run_without_bit_for_bit(context):
    everything = [make_tracker(name, samples=40, **SETTINGS.get(name, {})) for name in KINDS]
    everything += (
        [make_tracker("llc", every=2, samples=40, **SETTINGS["llc"])] if context == "plain" else []
    )
    tracked, plain = run(everything, CONTEXTS[context]), run([], CONTEXTS[context])
    assert all(torch.equal(tracked[0][key], plain[0][key]) for key in plain[0])
    assert all(map(torch.equal, tracked[1], plain[1]))
    assert tracked[2] == plain[2]
    assert torch.equal(tracked[3], plain[3])
    for mine, other in zip(tracked[4]["state"].values(), plain[4]["state"].values(), strict=True):
        assert all(torch.equal(mine[key], other[key]) for key in other)
    for row in tracked[5]:
        assert all(
            math.isfinite(v) for k, v in row.items() if isinstance(v, float) and k != "top_drift"
        ), row


def test_autocast_and_no_grad_around_a_measurement_do_not_change_it():
    model = lh.models.mlp([4, 6, 3])  # float32, which autocast would make bfloat16
    problem, optimizer = (
        lh.Problem(model, "cross_entropy", (torch.ones(5, 4).cumsum(0), torch.arange(5) % 3)),
        None,
    )
    rows = []
    for context in CONTEXTS.values():
        with context():
            rows.append(make_tracker("top", samples=None).measure(problem, optimizer))
    assert rows[0]["top_1"] == rows[1]["top_1"] == rows[2]["top_1"]


@pytest.mark.parametrize("name", [*KINDS, "llc"])
def test_a_state_dict_through_disk_form_resumes_the_same_numbers(name):
    problem, optimizer = small()
    tracker = make_tracker(name, samples=30, **SETTINGS.get(name, {}))
    for step in steps_of(problem, optimizer, 3):
        if step == 2:
            kept = unpack(*pack(tracker.state_dict()))
        row = tracker.measure(problem, optimizer, 0, step)
    again = make_tracker(name, samples=30, **SETTINGS.get(name, {}))
    again.load_state_dict(kept)
    problem, optimizer = small()
    for step in steps_of(problem, optimizer, 3):
        if step >= 2:
            found = again.measure(problem, optimizer, 0, step)
    assert {k: v for k, v in found.items() if "seconds" not in k} == {
        k: v for k, v in row.items() if "seconds" not in k
    }


def test_what_goes_wrong_is_a_status_and_ends_nothing():
    problem, optimizer = small()
    nn.init.constant_(problem.model[0].weight, math.nan)  # a run that diverged
    for name in (*KINDS, "llc"):
        tracker = make_tracker(name, samples=None)
        with pytest.warns(
            RuntimeWarning,
            match=rf"the tracker '{name}' could not measure at step 7 \(.*; its columns",
        ):
            row = tracker.measure(problem, optimizer, step=7)
        tracker.measure(problem, optimizer, step=8)  # warns once
        assert row[f"{name}_status"] != "CONVERGED", row
        assert set(tracker.columns) <= set(row)
    problem, optimizer = small()
    with pytest.warns(RuntimeWarning, match="the tracker 'edge' could not measure"):
        row = make_tracker("edge").measure(problem, None)
    assert row["edge_status"].startswith("TypeError: optimizer must be a torch.optim.Optimizer")
    assert math.isnan(row["edge"])
    assert math.isnan(row["edge_threshold"])
    with pytest.warns(RuntimeWarning, match="the tracker 'trace' could not measure"):
        row = make_tracker("trace").measure(problem.model)
    assert row["trace_status"].startswith("TypeError: problem must be a lambdahat.Problem")


def test_an_interrupt_is_not_swallowed(monkeypatch):
    problem, _ = small()
    tracker = make_tracker("norms")

    def interrupted(sample, optimizer):
        raise KeyboardInterrupt

    monkeypatch.setattr(tracker, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tracker.measure(problem)


@pytest.mark.parametrize("name", ["trace", "spectrum", "top", "variance", "edge", "llc"])
def test_full_results_are_kept_and_drawn(name, tmp_path):
    problem, optimizer = small()
    tracker = make_tracker(name, keep=True, samples=30, **SETTINGS.get(name, {}))
    tracker.folder = tmp_path
    row = tracker.measure(problem, optimizer, 1, 12)
    stored = lh.Result.load(tmp_path / f"{name}-00000012.json")
    assert stored.cost <= row[f"{name}_cost"]
    assert lh.plot(stored) is not None


def test_batches_of_other_shapes_stay_as_they_are():
    """Sequences padded to each batch's own length cannot be put together."""
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7)).double()
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randint(0, 7, (4, length), generator=generator),) * 2 for length in (3, 5, 8)]
    problem = lh.Problem(model, "cross_entropy", batches)
    tracker = make_tracker("norms", samples=7)
    assert tracker.measure(problem)["norms_status"] == "CONVERGED"
    assert tracker.sample_of(problem).num_samples == 7


def test_batch_statistics_keep_the_problem_s_batches():
    model = BatchNormNet().double()
    x, y = torch.randn(30, 4).double(), torch.randint(0, 3, (30,))
    problem = lh.Problem(model, "cross_entropy", (x, y), norm="train", batch_size=10)
    assert make_tracker("norms", samples=20).sample_of(problem).batches.sizes == [10, 10]


def test_names():
    assert [
        tracker.name for tracker in make_trackers("llc, wbic,top,drift,overlap,spectrum,degeneracy")
    ] == ["llc", "top", "spectrum"]
    for name in TRACKERS:
        tracker = make_tracker(name, every=2, unit="step", samples=50, seed=1)
        assert isinstance(tracker, Tracker)
        assert (tracker.every, tracker.unit, tracker.samples, tracker.seed) == (2, "step", 50, 1)


MISUSES = {
    "unknown name": (
        lambda: make_tracker("traces"),
        ValueError,
        "name must be one of 'trace', 'spectrum'",
    ),
    "no names": (lambda: make_trackers([]), ValueError, "names must name at least one tracker"),
    "every 0": (
        lambda: make_tracker("trace", every=0),
        ValueError,
        "every must be an integer of at least 1",
    ),
    "unknown unit": (
        lambda: make_tracker("trace", unit="batch"),
        ValueError,
        "unit must be one of 'step', 'epoch'",
    ),
    "one sample": (
        lambda: make_tracker("trace", samples=1),
        ValueError,
        "samples must be an integer of at least 2",
    ),
    "a share": (
        lambda: make_tracker("trace", samples=0.1),
        TypeError,
        "samples must be an integer",
    ),
    "negative seed": (
        lambda: make_tracker("trace", seed=-1),
        ValueError,
        "seed must be an integer of at least 0",
    ),
    "a path to keep": (
        lambda: make_tracker("trace", keep="here"),
        TypeError,
        "keep must be True or False",
    ),
    "tol 0": (
        lambda: make_tracker("trace", tol=0.0),
        ValueError,
        "tol must be a finite number above 0",
    ),
    "depth 0": (
        lambda: make_tracker("spectrum", depth=0),
        ValueError,
        "depth must be an integer of at least 1",
    ),
    "more pairs than products": (
        lambda: make_tracker("top", k=10, max_matvecs=5),
        ValueError,
        "k must be an integer in .*raise max_matvecs",
    ),
    "one probe": (
        lambda: make_tracker("variance", probes=1),
        ValueError,
        "probes must be an integer of at least 2",
    ),
    "chains apart": (
        lambda: make_tracker("llc", settings={"chains": 2}),
        ValueError,
        "settings must hold none of the tracker's own, got chains",
    ),
    "few gradients": (
        lambda: make_tracker("llc", max_gradients=10),
        ValueError,
        "max_gradients must be an integer",
    ),
    "no room for a pilot": (
        lambda: make_tracker("llc", max_gradients=400),
        ValueError,
        "max_gradients must be at least 1600 for 4 chains of HMC, got 400.*name another kernel",
    ),
    "no room for draws": (
        lambda: make_tracker("llc", max_gradients=400, settings={"kernel": "sgld", "draws": 300}),
        ValueError,
        "max_gradients must be at least .* for 4 chains, got 400",
    ),
    "settings that are no dict": (
        lambda: make_tracker("llc", settings=3),
        TypeError,
        "settings must be a dict",
    ),
    "no setting of llc": (
        lambda: make_tracker("llc", settings={"drawz": 300}),
        TypeError,
        "options must be those",
    ),
    "a setting out of range": (
        lambda: make_tracker("llc", settings={"draws": 1}),
        ValueError,
        "draws must be",
    ),
    "no temperature": (
        lambda: make_tracker("llc", settings={"nbeta": "hot"}),
        ValueError,
        "nbeta must be",
    ),
    "no kernel": (
        lambda: make_tracker("llc", settings={"kernel": "slgd"}),
        ValueError,
        "kernel must be one of",
    ),
    "no mode": (
        lambda: make_tracker("llc", settings={"mode": "quick"}),
        ValueError,
        "mode must be one of",
    ),
    "another's setting": (
        lambda: make_tracker("trace", k=3),
        TypeError,
        "settings must be those of TraceTracker: tol, max_matvecs, keep, got k",
    ),
    "another's state": (
        lambda: make_tracker("top").load_state_dict({"vectors": 3}),
        ValueError,
        r"state\['vectors'\] must be a tensor \(P, k\), or None",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    make, error, message = MISUSES[name]
    with pytest.raises(error, match=message):
        make()
