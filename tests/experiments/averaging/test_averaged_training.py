"""Recipes, averages beside a run, and tasks: each reduces to what the library's optimisers do by
themselves.
"""

import math

import pytest
import torch

from lambdahat.experiments.averaging import gadam_image, gadam_language
from lambdahat.experiments.averaging.averaged_training import (
    AveragePlan,
    Averages,
    averages,
    change,
    decades,
    gap,
    image_task,
    make_optimizer,
    recipe,
    schedule_of,
    sharing_runs,
    top_accuracy,
    train,
    training_of,
)
from lambdahat.experiments.averaging.averaging_ensembles import contraction, ensemble_accuracy
from lambdahat.experiments.averaging.gadam_language import (
    MADE,
    made_perplexity,
    made_text,
    perplexity,
)
from lambdahat.experiments.kit import training
from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.training import network, parameters_of, small_vgg
from lambdahat.optim import SWA, Averaged, Gadam, GadamX, Lookahead, PadamW
from lambdahat.problem import Problem

DIGITS = {
    "data": "digits",
    "training": 64,
    "held_out": 40,
    "side": 0,
    "batch": 16,
    "network": "VGG-4×2-BN",
    "seed": 1,
}


def cell_of(optimizer, rate=0.01, decay=0.0, epochs=4, **more):
    return {**DIGITS, **recipe(optimizer, rate, decay, epochs, **more)}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("SGD", torch.optim.SGD),
        ("SWA", SWA),
        ("Adam-IA", Averaged),
        ("AdamW", torch.optim.AdamW),
        ("Gadam", Gadam),
        ("GadamX", GadamX),
        ("PadamW", PadamW),
        ("ASGD", Averaged),
        ("Gadam+LH", Lookahead),
    ],
)
def test_a_name_makes_its_optimiser(name, kind):
    model = small_vgg(2)
    made = make_optimizer(cell_of(name, 0.3, 0.2), model.parameters(), 5)
    assert type(made) is kind
    group = made.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.3, 0.2)
    if averages(name):
        assert (group["average_start"], group["average_every"]) == (2 * 5, 5)


def test_decay_is_decoupled_in_gadam_and_in_the_gradient_of_adam_ia():
    """Without a gradient AdamW shrinks the weight by 1 − αλ; Adam steps against the sign of λθ,
    by α.
    """
    moved_to = {}
    for name in ("Gadam", "Adam-IA"):
        weight = torch.nn.Parameter(torch.tensor([2.0]))
        optimizer = make_optimizer(cell_of(name, 0.1, 0.5), [weight], 1)
        weight.grad = torch.zeros(1)
        optimizer.step()
        moved_to[name] = float(weight.detach())
    assert moved_to["Gadam"] == pytest.approx(2.0 * (1 - 0.05))
    assert moved_to["Adam-IA"] == pytest.approx(2.0 - 0.1, rel=1e-5)


def test_default_schedules_are_the_theses():
    for name, last in (("SGD", 0.01), ("SWA", 0.5)):
        cell = cell_of(name, 1.0, epochs=30)
        optimizer = make_optimizer(cell, small_vgg(2).parameters(), 3)
        schedule, rates = schedule_of(cell, optimizer), []
        for _ in range(30):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        assert rates[0] == 1.0
        assert rates[-1] == pytest.approx(last)
        if name == "SWA":
            assert cell["first"] == 16  # 30 · 161/300
            assert len(set(rates[15:])) == 1


def test_an_unknown_optimiser_or_network_is_refused():
    with pytest.raises(ValueError, match="optimizer must be one of 'SGD'"):
        make_optimizer(cell_of("Nadam"), small_vgg(2).parameters(), 1)
    with pytest.raises(ValueError, match="network must be one of"):
        network("VGG-5×2", (1, 8, 8), 10, 0)
    with pytest.raises(ValueError, match="plan must have averaged an iterate"):
        Averages([AveragePlan(3, 1)]).model(AveragePlan(3, 1), small_vgg(2), ())
    with pytest.raises(ValueError, match="every must be an integer of at least 1"):
        Averages([AveragePlan(0, 0)])


def test_the_small_network_has_its_parameters_with_and_without_batch_norm():
    plain, normed = (network(f"VGG-4×3{tail}", (1, 8, 8), 10, 0) for tail in ("", "-BN"))
    weights = (
        sum(9 * inputs * outputs + outputs for inputs, outputs in ((1, 3), (3, 6), (6, 12)))
        + 12 * 10
        + 10
    )
    assert parameters_of(plain) == weights
    assert parameters_of(normed) == weights + 2 * (3 + 6 + 12)


def test_one_run_has_the_average_that_gadam_keeps_itself():
    cell = cell_of("Gadam")
    kept = Averages([AveragePlan(2 * 4, 4), AveragePlan(0, 1)])
    task = image_task(cell, "cpu")
    trained = train(cell, task, kept)
    assert kept.counts == {AveragePlan(8, 4): 3, AveragePlan(0, 1): 16}
    same = kept.model(AveragePlan(8, 4), task.model, task.training(cell["batch"]))
    for ours, theirs in zip(
        same.state_dict().values(), trained.solution.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    other = kept.model(AveragePlan(0, 1), task.model, ())
    assert not torch.allclose(next(other.parameters()), next(same.parameters()))


def test_a_plan_that_begins_at_the_last_step_is_the_iterate():
    cell = cell_of("SGD", 0.1)
    last = AveragePlan(16, 1)
    kept, task = Averages([last]), image_task(cell, "cpu")
    train(cell, task, kept)
    model = kept.model(last, task.model, ())
    for ours, theirs in zip(model.parameters(), task.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_rows_of_a_run_tell_average_from_iterate():
    cell = cell_of("SWA", 0.1)
    task = image_task(cell, "cpu")
    trained = train(cell, task)
    assert [row["averaged"] for row in trained.rows] == [False, True, True, True]
    first, second = trained.rows[:2]
    assert first["accuracy"] == first["iterate accuracy"]
    assert first["average norm"] is None
    # one iterate is its own average
    assert second["average norm"] == pytest.approx(second["norm"], rel=1e-6)
    last = trained.rows[-1]
    squares = sum(float(p.detach().double().square().sum()) for p in trained.solution.parameters())
    assert (
        last["solution norm"] == last["average norm"] == pytest.approx(math.sqrt(squares), rel=1e-6)
    )
    assert last["average norm"] <= sum(row["norm"] for row in trained.rows[1:]) / 3  # Theorem 20
    assert last["effective rate"] == pytest.approx(last["rate now"] / last["norm"] ** 2)
    assert trained.end["begun"] == 2
    assert trained.end["before"] == second["iterate accuracy"]
    assert contraction(trained.rows) > 0
    # other batch norm
    assert top_accuracy(trained.solution, task.held_out) == pytest.approx(last["accuracy"], abs=5.1)


def test_the_weights_start_and_the_data_have_seeds_of_their_own():
    one, other = image_task(DIGITS, "cpu"), image_task(DIGITS, "cpu", start=7)
    assert torch.equal(one.problem.batches.first().data[0], other.problem.batches.first().data[0])
    assert not torch.equal(next(one.model.parameters()), next(other.model.parameters()))


def test_lookahead_and_automatic_starts_train():
    for name, more in (("Gadam+LH", {}), ("SWA-Auto", {"patience": 1})):
        cell = cell_of(name, epochs=6, schedule="flat") | more
        end = train(cell, image_task(cell, "cpu")).end
        assert math.isfinite(end["accuracy"])
        assert end["stopped"] <= 6


def logits(values):
    return torch.nn.Sequential(torch.nn.Flatten(), _Constant(torch.tensor(values)))


class _Constant(torch.nn.Module):
    def __init__(self, values):
        super().__init__()
        self.values = torch.nn.Parameter(values)

    def forward(self, x):
        return self.values.expand(len(x), -1)


def test_an_ensemble_averages_probabilities_not_votes():
    """Two of three prefer class 0 by a little, the third is sure of class 1."""
    models = [logits([0.1, 0.0]), logits([0.1, 0.0]), logits([-5.0, 5.0])]
    problem = Problem(models[0], "cross_entropy", (torch.zeros(4, 1), torch.tensor([1, 1, 1, 0])))
    assert ensemble_accuracy(models, problem.batches) == 75.0
    assert ensemble_accuracy(models[:2], problem.batches) == 25.0
    assert top_accuracy(models[0], problem.batches, top=2) == 100.0


def test_readings_pair_networks_and_seeds():
    rows = Rows(
        [
            {"network": net, "seed": seed, "optimizer": name, "x": base + 10 * seed, "y": 1.0}
            for net, base in (("a", 1.0), ("b", 5.0))
            for seed in (0, 1)
            for name in ("p", "q")
        ]
    )
    upper = Rows([{**row, "x": row["x"] + 2} for row in rows])
    reading = gap(upper, rows, "x")
    # not 8: optimisers are no replicas
    assert (reading.value, reading.stderr, reading.count) == (2.0, 0.0, 4)
    assert change(rows, "x", "y").value == pytest.approx(7.0)
    ten = Rows([{**row, "x": 10 * row["x"]} for row in rows])
    assert decades(ten, rows, "x").value == pytest.approx(1.0)
    assert math.isnan(decades(Rows([{"network": "a", "seed": 0, "x": -1.0}]), rows, "x").value)


def test_the_made_text_has_its_entropy_rate():
    """A model with the chain's own probabilities has the perplexity exp(H)."""
    tokens = made_text(20_000, MADE)
    stay, other = 0.7 + 0.3 / MADE, 0.3 / MADE
    table = torch.full((MADE, MADE), other).log()
    table[torch.arange(MADE), (torch.arange(MADE) + 1) % MADE] = math.log(stay)
    exact = torch.nn.Embedding.from_pretrained(table, freeze=False)
    problem = Problem(exact, "cross_entropy", (tokens[:-1].view(1, -1), tokens[1:].view(1, -1)))
    assert perplexity(exact, problem) == pytest.approx(made_perplexity(), rel=0.02)
    assert made_perplexity() < MADE


def test_a_language_run_judges_its_solution_as_training_did():
    cells = {cell["name"]: cell for cell in gadam_language.EXPERIMENT.grid("smoke")}
    assert cells["Padam"]["schedule"] == "step"
    task, _ = gadam_language.language_task(cells["Gadam"], "cpu")
    trained = train(cells["Gadam"], task)
    judged_again = perplexity(trained.solution, task.problem.on(task.held_out))
    assert judged_again == pytest.approx(math.exp(trained.end["loss"]), rel=1e-4)
    rows = gadam_language.run(cells["Gadam"], "cpu")
    same = next(
        row
        for row in rows
        if row["kind"] == "average" and (row["start"], row["frequency"]) == (0.5, 1)
    )
    assert same["perplexity"] == pytest.approx(judged_again, rel=1e-4)
    assert made_perplexity() < judged_again < 1.2 * MADE


def test_a_spectrum_is_of_the_same_solution_as_the_sharpness_beside_the_accuracy():
    """With as many Lanczos steps λ₁ in evaluation mode is that of the plain run; tr(H²)/P is at
    least λ₁²/P.
    """
    cells = gadam_image.EXPERIMENT.grid("smoke")
    whole = next(
        cell for cell in cells if cell.get("part") == "spectrum" and cell["optimizer"] == "Gadam"
    )
    plain = next(
        cell
        for cell in cells
        if cell == {name: value for name, value in whole.items() if name != "part"}
    )
    train_mode, eval_mode = gadam_image.run(whole, "cpu")
    assert (train_mode["mode"], eval_mode["mode"]) == ("train", "eval")
    assert eval_mode["largest"] == pytest.approx(
        gadam_image.run(plain, "cpu")[-1]["largest"], rel=1e-4
    )
    assert sum(eval_mode["weights"]) == pytest.approx(1.0, abs=1e-3)
    for row in (train_mode, eval_mode):
        assert row["frobenius"] > 0.5 * row["largest"] ** 2 / row["parameters"]
    assert train_mode["largest"] != pytest.approx(
        eval_mode["largest"], rel=1e-3
    )  # batch statistics have a curvature too


@pytest.mark.parametrize("optimizer", ["SGD", "Gadam"])
def test_cells_that_train_alike_share_a_run_and_have_the_rows_of_their_own(optimizer, monkeypatch):
    cells = [
        cell
        for cell in gadam_image.EXPERIMENT.grid("smoke")
        if (cell["optimizer"], cell["seed"]) == (optimizer, 0)
    ]
    alone = [gadam_image.run(cell, "cpu") for cell in cells]
    fits = []
    monkeypatch.setattr(
        training,
        "fit",
        lambda *given, fit=training.fit, **more: fits.append(1) or fit(*given, **more),
    )
    with sharing_runs():
        assert [gadam_image.run(cell, "cpu") for cell in cells] == alone
    assert (len(cells), len(fits)) == (2, 1)
    gadam_image.run(cells[0], "cpu")
    assert len(fits) == 2  # outside nothing is kept


def test_a_shared_run_has_the_averages_that_were_kept_of_it_and_is_trained_again_for_others():
    cell = cell_of("AdamW", schedule="flat")
    early, late = AveragePlan(4, 4), AveragePlan(8, 4)
    models = []
    with sharing_runs():
        for plans in ([early, late], [late], [AveragePlan(12, 4)]):
            task, beside = image_task(cell, "cpu"), Averages(plans)
            trained = train(cell, task, beside)
            models.append([*beside.model(plans[-1], task.model, task.training(16)).parameters()])
            assert trained.solution is task.model
    assert all(map(torch.equal, models[0], models[1]))
    assert not all(map(torch.equal, models[0], models[2]))


def test_a_training_is_known_by_what_decides_it():
    cell = {**cell_of("SGD"), "run": "SGD, linear", "samples": 32, "depth": 4}
    assert training_of(cell) == training_of(
        {**cell, "run": "SGD", "samples": 64, "part": "spectrum"}
    )
    for name, value in (
        ("rate", 0.02),
        ("seed", 2),
        ("first", 3),
        ("batch", 32),
        ("network", "VGG-4×4-BN"),
    ):
        assert training_of(cell) != training_of({**cell, name: value})
