"""Results: frozen, on disk and back, and the readings of a spectrum against dense matrices."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from lambdahat import results
from lambdahat._core import storage
from lambdahat._core.rng import generator
from lambdahat._core.storage import Damaged, seal
from lambdahat.estimators import spectrum
from lambdahat.graphs.cluster_counts import Clusters, Gap
from lambdahat.maxent import fit
from lambdahat.operators import operator
from lambdahat.randommatrix.advice_rules import Recommendation
from lambdahat.randommatrix.rate_limits import PositiveEstimate
from lambdahat.results import (
    Chains,
    Density,
    Diagnostics,
    Eigenpairs,
    Estimate,
    Landscape,
    LearningCoefficient,
    Moments,
    Result,
    Sensitivity,
    Spectrum,
    Status,
    Variance,
    write_atomically,
)
from lambdahat.results.measurement import Comparison, Measurement
from tests.cases import with_eigenvalues

ODD = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324], dtype=torch.float64)
PLAIN = Estimate(1.25, 0.5, 7, Status.BUDGET_SPENT, 3)
SEEN = Diagnostics(
    1.01, 90.0, 80.0, math.nan, PLAIN, np.ones(2), 0.9, np.array([True, False]), np.array([0, 3])
)
CHAINS = Chains(
    np.ones((2, 3)),
    np.zeros((2, 3)),
    np.ones((2, 3)),
    np.ones((2, 3)),
    "SGLD",
    1e-4,
    20.0,
    torch.ones(4),
    0.5,
    100,
    10,
    5,
    1,
    "batched",
    SEEN,
    virials=np.ones((2, 3)),
    observables={"norm": np.ones((2, 3, 4))},
    parameters=torch.ones(2, 3, 4),
    reasons={"draws": "given"},
    cost=16,
    status=Status.NOT_MIXED,
)

EXAMPLES: dict[str, Result] = {
    "Estimate": Estimate(0.1 + 0.2, 1e-300, 12, Status.QUADRATURE, 4.5),
    "Estimate, not finite": Estimate(math.nan, math.inf, 0, Status.CONVERGED),
    "Estimate of a vector": Estimate(ODD, torch.ones(6, dtype=torch.float32)),
    "Estimate in bfloat16": Estimate(torch.tensor([1.0, 3.140625], dtype=torch.bfloat16), 0.0),
    "Estimate of integers": Estimate(torch.arange(3), torch.tensor([True, False])),
    "Eigenpairs": Eigenpairs(
        torch.ones(2).double(), torch.eye(3, 2), torch.zeros(2), torch.tensor([True, False]), 9
    ),
    "Density": Density(np.linspace(0, 1, 4), np.ones(4), np.zeros(4), 0.1),
    "MaxentDensity": fit([1.0, 0.1, -0.5], prior=np.exp),
    "Spectrum": Spectrum(
        np.ones((2, 3)), np.full((2, 3), 1 / 3), np.zeros((2, 3)), 50, True, 1e-9, 6
    ),
    "Moments": Moments(np.ones(3), np.zeros(3), np.eye(3), "chebyshev", (-1.0, 2.0), 5),
    "Landscape": Landscape(
        np.arange(3.0), np.ones((3, 3)), np.zeros((3, 3)), ("a", "b"), (1.0, -2.0), 9
    ),
    "Landscape, one set": Landscape(np.arange(3.0), np.ones(3)),
    "Variance": Variance(PLAIN, PLAIN, PLAIN, PLAIN, PLAIN, PLAIN, None, PLAIN, 3),
    "Diagnostics": SEEN,
    "Chains": CHAINS,
    "LearningCoefficient": LearningCoefficient(
        2.0,
        0.1,
        16,
        Status.NOT_MIXED,
        15.0,
        np.ones(2),
        PLAIN,
        20.0,
        "given",
        chains=CHAINS,
        sensitivity=Sensitivity(PLAIN, PLAIN),
    ),
    "Sensitivity": Sensitivity(PLAIN, Estimate(math.nan, math.nan)),
    "LearningCoefficient, bare": LearningCoefficient(2.0),
    "Comparison": Comparison(
        {
            "trace": {"SGD": (PLAIN, PLAIN), "NGD": (PLAIN, Estimate(3.0))},
            "loss": {"SGD": (PLAIN, PLAIN), "NGD": (PLAIN, PLAIN)},
        },
        {"nbeta": 20.0},
    ),
    "Measurement": Measurement(
        {"trace": PLAIN, "layers": {"a": PLAIN, "b": {"c": PLAIN}}, "n": 3},
        {"model": "λ", "when": None, "sizes": (1, 2), "ok": True, 4: 5},
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_notebook_shows_numbers_errors_cost_status_and_remedy(name):
    """As HTML that any notebook shows: nothing is fetched or run, and no colours are set."""
    result = EXAMPLES[name]
    shown = ElementTree.fromstring(result._repr_html_())
    assert shown.find("div/b").text == type(result).__name__
    rows = result.table()
    status = getattr(result, "status", Status.CONVERGED)
    text = " ".join(shown.itertext())
    found = {status, *(Status[row["status"]] for row in rows)}
    for one in found:
        assert one.value in text
    assert "CONVERGED" in text or status is not Status.CONVERGED or not hasattr(result, "status")
    if rows:
        header = [cell.text for cell in shown.findall("table/thead/tr/th")]
        assert {"quantity", "value", "standard error", "status"} <= set(header)
        assert ("cost" in header) is (not isinstance(result, Comparison))
        first = [cell.text for cell in shown.find("table/tbody/tr")]
        value = first[header.index("value")]
        assert float(value) == pytest.approx(rows[0]["value"], rel=1e-5, nan_ok=True)
    assert not {part.tag for part in shown.iter()} & {"script", "style", "link"}
    for part in shown.iter():
        assert set(part.attrib) <= {"style", "colspan", "alt", "src"}
        assert "color" not in part.get("style", "")
        assert part.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")


def test_a_notebook_shows_a_picture_where_there_is_a_curve():
    assert "<img" in EXAMPLES["MaxentDensity"]._repr_html_()
    assert "<img" in EXAMPLES["Comparison"]._repr_html_()
    assert "<img" not in EXAMPLES["Estimate"]._repr_html_()


def test_a_notebook_shows_the_first_rows_of_a_long_table():
    many = Measurement({f"n{i}": Estimate(float(i)) for i in range(40)})
    shown = ElementTree.fromstring(many._repr_html_())
    assert len(shown.findall("table/tbody/tr")) == 13
    assert "… and 28 more: see frame()" in " ".join(shown.itertext())


@pytest.mark.parametrize("name", EXAMPLES)
def test_texts_are_short_and_hold_no_array(name):
    result = EXAMPLES[name]
    assert repr(result).startswith(f"{type(result).__name__}(")
    for text in (repr(result), str(result)):
        assert len(text) < 700
        assert "array(" not in text
        assert "tensor(" not in text


def test_texts_have_values_and_shapes():
    density = Density(np.zeros(4000), np.zeros(4000), np.zeros(4000), 0.25)
    assert (
        str(density)
        == "Density(grid=float64 (4000,), values=float64 (4000,), stderr=float64 (4000,),"
        " width=0.25)"
    )
    told = repr(
        Measurement({"trace": Estimate(5.0, 0.1), "density": density}, {"sizes": tuple(range(99))})
    )
    assert "{'trace': 5 ± 0.1, 'density': Density(…)}" in told
    spent = Estimate(5.0, 0.1, 3, Status.BUDGET_SPENT)
    assert repr(Measurement({"trace": spent})).startswith(
        "Measurement(results={'trace': 5 ± 0.1 [BUDGET_SPENT]}"
    )
    assert "'sizes': (0, 1, 2, 3, 4, … 99 in all)" in told
    assert "values=[3, 1.5], vectors=float64 (4, 2)" in repr(
        Eigenpairs(
            torch.tensor([3.0, 1.5]), torch.eye(4, 2).double(), torch.zeros(2), torch.ones(2) > 0
        )
    )
    assert repr(Estimate(torch.ones(7))).startswith(
        "Estimate(value=float32 (7,), stderr=0, cost=0, status=CONVERGED"
    )
    assert repr(Estimate(torch.tensor(2.5), np.array(math.nan))).startswith(
        "Estimate(value=2.5, stderr=nan,"
    )


def test_kinds_of_a_result_with_a_text_of_its_own_inherit_it(monkeypatch):
    monkeypatch.setattr(Result, "_types", dict(Result._types))

    @dataclasses.dataclass(frozen=True)
    class Own(Result):
        def __repr__(self) -> str:
            return "own"

    @dataclasses.dataclass(frozen=True)
    class Kind(Own):
        part: int = 1

    assert repr(Kind()) == "own"


def same(first: Any, second: Any) -> bool:
    """Equal in type, dtype and every bit that matters; NaN equals NaN and −0 is not 0."""
    if dataclasses.is_dataclass(first):
        names = [f.name for f in dataclasses.fields(first)]
        return type(first) is type(second) and all(
            same(getattr(first, n), getattr(second, n)) for n in names
        )
    if isinstance(first, Tensor):
        alike = (
            isinstance(second, Tensor)
            and first.dtype == second.dtype
            and first.shape == second.shape
        )
        return alike and same(first.double().numpy(), second.double().numpy())
    if isinstance(first, np.ndarray):
        alike = (
            isinstance(second, np.ndarray)
            and first.dtype == second.dtype
            and first.shape == second.shape
        )
        return alike and first.tobytes() == second.tobytes()
    if isinstance(first, dict):
        return (
            isinstance(second, dict)
            and first.keys() == second.keys()
            and all(same(first[k], second[k]) for k in first)
        )
    if isinstance(first, tuple):
        return (
            isinstance(second, tuple)
            and len(first) == len(second)
            and all(map(same, first, second))
        )
    if isinstance(first, float):
        return isinstance(second, float) and (
            first == second or (math.isnan(first) and math.isnan(second))
        )
    return type(first) is type(second) and first == second


def test_every_kind_of_result_has_an_example():
    modules = (results.__name__, Measurement.__module__, Density.__module__)
    here = {name for name, kind in Result._types.items() if kind.__module__ in modules}
    assert here == {type(example).__name__ for example in EXAMPLES.values()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_results_are_frozen(name):
    field = dataclasses.fields(EXAMPLES[name])[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(EXAMPLES[name], field, None)


@pytest.mark.parametrize("name", EXAMPLES)
def test_save_and_load_is_the_identity(name, tmp_path):
    example = EXAMPLES[name]
    path = tmp_path / "sub" / "folder" / "r"
    written = example.save(path)
    assert written.is_file()
    assert same(example, type(example).load(path))
    assert same(example, Result.load(written))


FRESH = """
import importlib, pkgutil, sys
import lambdahat
from lambdahat.results import Result
print(*(type(Result.load(path)).__name__ for path in sys.argv[1:]))
from lambdahat._core.storage import CORE, TYPE_HOMES
for module in CORE:
    importlib.import_module(f"lambdahat.{module}")
known = {*Result._types, *(name for names in TYPE_HOMES.values() for name in names.split())}
for module in pkgutil.walk_packages(lambdahat.__path__, "lambdahat."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(*sorted(set(Result._types) ^ known))
homes = TYPE_HOMES.items()
modules = {name: f"lambdahat.{module}" for module, names in homes for name in names.split()}
print(*(name for name, module in modules.items() if Result._types[name].__module__ != module))
"""


def test_a_fresh_process_loads_every_kind_of_result(tmp_path):
    """``import lambdahat`` leaves out modules whose results a file may hold."""
    kept = [
        Recommendation("rate", 8, PositiveEstimate(0.1, 0.01, log_error=0.1), "known").save(
            tmp_path / "advice"
        ),
        Clusters(3.0, 0.1, gaps=(Gap(0.5, 3.0, 0.4, 0.6, 1.0),)).save(tmp_path / "clusters"),
        Measurement({"verdict": Clusters(2.0)}).save(tmp_path / "measurement"),
    ]
    command = [sys.executable, "-c", FRESH, *(str(path) for path in kept)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.split("\n") == ["Recommendation Clusters Measurement", "", "", ""]


def test_tensors_that_need_gradients_and_views_are_saved(tmp_path):
    value = torch.arange(6.0).reshape(2, 3).T.requires_grad_()
    Estimate(value).save(tmp_path / "r")
    assert torch.equal(Estimate.load(tmp_path / "r").value, value.detach())


def test_numpy_scalars_become_python_numbers(tmp_path):
    Estimate(np.float32(0.5), np.float64(math.inf), np.int64(3)).save(tmp_path / "r")
    assert Estimate.load(tmp_path / "r") == Estimate(0.5, math.inf, 3)


def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path):
    with pytest.raises(
        TypeError, match="a result can hold numbers, text, arrays and results, got object"
    ):
        Measurement({"x": object()}).save(tmp_path / "r")
    assert not list(tmp_path.rglob("*.json"))


def test_saving_again_removes_the_old_arrays(tmp_path):
    path = tmp_path / "r.json"
    for size in (3, 4):
        Estimate(torch.ones(size)).save(path)
        assert len(list(tmp_path.glob("*.npz"))) == 1
    assert len(Estimate.load(path).value) == 4
    Estimate(1.0).save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_names_with_dots_stay_apart(tmp_path):
    for name in ("lr.0.1", "lr.0.2", "lr"):
        Estimate(torch.full((2,), float(len(name)))).save(tmp_path / name)
    assert float(Estimate.load(tmp_path / "lr.0.1").value[0]) == 6.0
    assert float(Estimate.load(tmp_path / "lr").value[0]) == 2.0
    assert len(list(tmp_path.iterdir())) == 6


class Killed(BaseException):
    pass


@pytest.mark.parametrize("when", ["npz", "json"])
def test_a_killed_writer_leaves_the_old_result(when, tmp_path, monkeypatch):
    path = Estimate(torch.zeros(3)).save(tmp_path / "r")
    replace = os.replace

    def stop(source: str, target: Path) -> None:
        if str(target).endswith(when):
            raise Killed
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(Killed):
        Estimate(torch.ones(4)).save(path)
    monkeypatch.undo()
    assert torch.equal(Estimate.load(path).value, torch.zeros(3))
    assert not list(tmp_path.glob(".*"))  # no half-written file stays
    Estimate(torch.ones(4)).save(path)
    assert torch.equal(Estimate.load(path).value, torch.ones(4))


def test_atomic_writes_replace_and_clean_up(tmp_path):
    path = tmp_path / "f"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert oct(path.stat().st_mode & 0o777) == "0o644"
    assert [file.name for file in tmp_path.iterdir()] == ["f"]


def rewrite(path: Path, old: str, new: str) -> None:
    """Change a result and its digest, as another version of the library would have written it."""
    document = json.loads(path.read_text().replace(old, new))
    path.write_text(
        json.dumps(seal({key: value for key, value in document.items() if key != "digest"}))
    )


def damaged(path: Path, how: str) -> None:
    document = json.loads(path.read_text())
    arrays = path.with_name(document["arrays"]["file"])
    if how == "not JSON":
        path.write_text("{")
    elif how == "not text":
        path.write_bytes(b"\xff\xfe\x00")
    elif how == "other JSON":
        path.write_text("[1, 2]")
    elif how == "version":
        rewrite(path, '"version": 2', '"version": 99')
    elif how == "one digit":
        path.write_text(path.read_text().replace('"cost": 0', '"cost": 1'))
    elif how == "no digest":
        path.write_text(
            json.dumps({key: value for key, value in document.items() if key != "digest"})
        )
    elif how == "bit rot":
        arrays.write_bytes(arrays.read_bytes()[:-1] + b"x")
    elif how == "cut short":
        arrays.write_bytes(arrays.read_bytes()[:10])
    elif how == "no arrays":
        arrays.unlink()
    elif how == "unknown kind":
        rewrite(path, '"Estimate"', '"Oracle"')
    elif how == "unknown status":
        rewrite(path, '"CONVERGED"', '"BROKEN"')
    elif how == "other fields":
        rewrite(path, '"stderr"', '"sigma"')
    else:
        path.unlink()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("not JSON", Damaged, "r.json is not a lambdahat result, or a damaged one: Expecting"),
        ("not text", Damaged, "r.json is not a lambdahat result, or a damaged one: .*codec"),
        ("other JSON", ValueError, r"path must name a result written by save\(\)"),
        (
            "version",
            ValueError,
            r"path must hold format version 2 or 1, got version 99 in .*r\.json; upgrade",
        ),
        ("bit rot", Damaged, r"r\..*\.npz is damaged: it is not what r\.json was saved with"),
        ("cut short", Damaged, r"r\..*\.npz is damaged"),
        ("one digit", Damaged, r"r\.json is damaged: its contents do not match their digest"),
        ("no digest", Damaged, r"r\.json is damaged: it has no digest"),
        ("no arrays", FileNotFoundError, r"path must have its arrays beside it.*copy the \.npz"),
        (
            "unknown kind",
            ValueError,
            "r.json .*path must hold a known result, got Oracle; upgrade lambdahat",
        ),
        ("unknown status", ValueError, "r.json.*BROKEN.*upgrade lambdahat"),
        ("other fields", ValueError, "r.json.*sigma.*upgrade lambdahat"),
        (
            "missing",
            FileNotFoundError,
            r"path must name a result written by save\(\), got .*no such file",
        ),
    ],
)
def test_damage_is_named(how, error, message, tmp_path):
    path = Estimate(torch.ones(3)).save(tmp_path / "r")
    damaged(path, how)
    with pytest.raises(error, match=message):
        Estimate.load(path)


def test_results_of_the_first_version_are_read_without_a_digest(tmp_path):
    path = Estimate(torch.ones(3), cost=4).save(tmp_path / "r")
    document = json.loads(path.read_text())
    del document["digest"]
    path.write_text(json.dumps({**document, "version": 1}))
    assert Estimate.load(path).cost == 4


STORED = Path(__file__).parent / "stored"  # written before the modules of results were moved


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "MaxentDensity"])
def test_results_that_were_stored_earlier_are_read(name):
    path = STORED / name.replace(", ", "-").replace(" ", "-").lower()
    assert same(EXAMPLES[name], type(EXAMPLES[name]).load(path))


def test_a_field_that_a_newer_version_has_added_is_left_out_with_a_warning(tmp_path):
    """The last minor version reads what this one writes, as long as fields are only added."""
    path = PLAIN.save(tmp_path / "r")
    rewrite(path, '"stderr"', '"added": {"type": "Estimate", "fields": {"value": 1.0}}, "stderr"')
    with pytest.warns(UserWarning, match="Estimate with added, which is left out; upgrade lambda"):
        assert same(PLAIN, Result.load(path))


def test_every_kind_that_was_stored_earlier_is_known():
    """A file names the kind of its result and the fields: neither may be renamed."""
    kinds = json.loads((STORED / "kinds.json").read_text())
    assert len(kinds) > 50
    for name, fields in kinds.items():
        kind = storage._kind(name, fields)
        assert kind is not None, name
        assert set(fields) <= {field.name for field in dataclasses.fields(kind)}, name


def test_the_wrong_type_is_named(tmp_path):
    Estimate(1.0).save(tmp_path / "r")
    with pytest.raises(
        TypeError, match=r"hold a Spectrum, got an Estimate; call Estimate.load, or Result.load"
    ):
        Spectrum.load(tmp_path / "r")


def test_measurement_is_a_folder_and_a_table(tmp_path):
    readings = spectrum(operator(with_eigenvalues([3.0, 2.0, 1.0])), probes=2)
    pairs = EXAMPLES["Eigenpairs"]
    whole = Measurement(
        {"trace": PLAIN, "spectrum": readings, "eigen": pairs, "layers": {"fc": PLAIN}}, {"n": 5}
    )
    whole.save(tmp_path / "m")
    for path in (tmp_path / "m", tmp_path / "m" / "measurement.json"):
        assert same(whole, Measurement.load(path))
    assert same(Result.load(tmp_path / "m" / "trace.json"), PLAIN)
    rows = {row["quantity"]: row for row in whole.table()}
    assert rows["trace"] == {
        "quantity": "trace",
        "value": 1.25,
        "stderr": 0.5,
        "cost": 7,
        "status": "BUDGET_SPENT",
    }
    assert {
        "spectrum.trace",
        "spectrum.frobenius",
        "spectrum.largest",
        "eigen[1]",
        "eigen[2]",
        "layers.fc",
    } <= set(rows)
    assert whole["trace"] is PLAIN


def test_interval_is_student():
    low, high = Estimate(10.0, 2.0, dof=5).interval(0.9)
    assert (high - low) / 4 == pytest.approx(stats.t.ppf(0.95, 5), rel=1e-12)
    assert low + high == pytest.approx(20.0)
    assert Estimate(3.0).interval() == (3.0, 3.0)
    vector = Estimate(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])).interval()
    assert torch.allclose(vector[0], torch.tensor([1.0, 2.0 - 1.96]), atol=1e-3)


@pytest.mark.parametrize("level", [0, 1, 2, -0.5, math.nan])
def test_levels_lie_between_0_and_1(level):
    with pytest.raises(ValueError, match=r"level must lie in \(0, 1\), got"):
        Estimate(1.0, 1.0).interval(level)


def test_text_shows_error_and_remedy():
    assert float(Estimate(2.5)) == 2.5
    assert str(Estimate(2.5)) == "2.5"
    assert str(Estimate(2.5, 0.125)) == "2.5 ± 0.12"
    assert str(Estimate(torch.ones(3))) == "Estimate of shape (3,)"
    assert "raise max_matvecs" in str(PLAIN)


def test_every_status_but_converged_states_a_remedy():
    assert Status.CONVERGED.ok
    assert all(
        len(status.value) > 20 and not status.ok
        for status in Status
        if status is not Status.CONVERGED
    )


def test_eigenpairs_iterate_as_estimates():
    pairs = Eigenpairs(
        torch.tensor([3.0, 2.0]),
        torch.eye(3, 2),
        torch.tensor([0.1, 0.2]),
        torch.tensor([True, True]),
    )
    assert len(pairs) == 2
    (first, vector), _ = pairs
    assert float(first) == 3.0
    assert first.stderr == pytest.approx(0.1)
    assert torch.equal(vector, torch.eye(3)[0])


# Spectra against dense matrices. At full depth the Gauss rule of a probe z is its whole measure
# Σ(qᵢᵀz)²δ(λᵢ).

VALUES = torch.cat(
    [
        torch.linspace(-0.5, 1.0, 26, dtype=torch.float64),
        torch.tensor([6.0, 9.0, -7.0, 12.0]).double(),
    ]
)
MATRIX = with_eigenvalues(VALUES, seed=3)


@pytest.fixture(scope="module")
def many() -> Spectrum:
    """200 probes, each to the end of its Krylov space."""
    return spectrum(operator(MATRIX), depth=30, probes=200, seed=1)


@pytest.mark.parametrize("order", [0, 1, 2, 3, 7, 13])
def test_moments_are_exact_for_each_probe_to_the_degree_of_the_rule(order):
    short = spectrum(operator(MATRIX), depth=7, probes=1, seed=1)
    full = spectrum(operator(MATRIX), depth=30, probes=1, seed=1)
    scale = 12.0**order
    assert float(short.moment(order)) == pytest.approx(
        float(full.moment(order)), rel=1e-9, abs=1e-9 * scale
    )


@pytest.mark.parametrize(
    ("reading", "truth"),
    [
        (lambda s: s.moment(1), float(VALUES.mean())),
        (lambda s: s.moment(2), float((VALUES**2).mean())),
        (lambda s: s.moment(4), float((VALUES**4).mean())),
        (lambda s: s.trace, float(VALUES.sum())),
        (lambda s: s.mean, float(VALUES.mean())),
        (lambda s: s.frobenius, float(VALUES.norm())),
        (lambda s: s.negative_mass, float((VALUES < 0).double().mean())),
        (lambda s: s.expectation(np.exp), float(VALUES.exp().mean())),
    ],
)
def test_readings_agree_with_the_dense_matrix_within_their_errors(reading, truth, many):
    found = reading(many)
    assert found.cost == 200 * 30
    assert found.stderr > 0
    assert abs(float(found) - truth) < 4 * found.stderr
    assert found.stderr < 0.2 * abs(truth)  # an error bar that says something


def test_moment_0_is_exact(many):
    assert float(many.moment(0)) == pytest.approx(1.0, abs=1e-12)
    assert many.moment(0).stderr == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("power", [1, 2])
def test_standard_errors_are_true(power, many):
    """The z-scores of 200 one-probe readings have unit variance, and mean 0.

    The spread put into the standard error is itself measured by the one probe, so its square is
    averaged over probes before it is compared: Σ(x − μ)²/mean(s²) is near χ²₂₀₀, widened for the
    skewed readings of a spiked spectrum.
    """
    truth = float((VALUES**power).sum())
    singles = [
        Spectrum(
            many.nodes[i : i + 1], many.weights[i : i + 1], many.residuals[i : i + 1], many.dim
        )
        for i in range(200)
    ]
    found = [one.expectation(lambda nodes: nodes**power, one.dim) for one in singles]
    errors = np.array([float(one) for one in found]) - truth
    variance = np.mean([one.stderr**2 for one in found])
    assert abs(errors.mean()) < 4 * math.sqrt(variance / 200)
    kurtosis = float(stats.kurtosis(errors, fisher=False))
    spread = math.sqrt((kurtosis - 1) / 200)  # of the sample variance, relative
    assert abs(errors.var() / variance - 1) < 4 * spread
    exact = 2 / 32 * float((VALUES ** (2 * power)).mean() - (VALUES**power).mean() ** 2) * 30**2
    assert variance == pytest.approx(exact, rel=0.1)  # 2/(P+2)·(tr f²/P − (tr f/P)²), scaled by P²


def test_intervals_of_single_probes_cover_the_trace():
    """200 draws of one probe in 400 dimensions: how many 95 % intervals hold is binomial, here
    within 3σ.
    """
    values = torch.linspace(-1, 3, 400, dtype=torch.float64)
    normal = torch.randn(400, 200, generator=generator(0, "cover"), dtype=torch.float64)
    weights = (normal / normal.norm(dim=0)).square()  # a sphere probe in the eigenbasis
    held = 0
    for probe in weights.T.numpy():
        nodes = values.numpy()[None]
        low, high = Spectrum(nodes, probe[None], np.zeros_like(nodes), 400).trace.interval(0.95)
        held += low <= float(values.sum()) <= high
    assert 0.95 * 200 - 3 * math.sqrt(200 * 0.95 * 0.05) <= held <= 199


def test_extremes_and_norm(many):
    low, high = many.extremes
    assert float(low) == pytest.approx(-7.0, abs=1e-9)
    assert float(high) == pytest.approx(12.0, abs=1e-9)
    assert float(many.spectral_norm) == pytest.approx(12.0, abs=1e-9)
    short = spectrum(operator(MATRIX), depth=5, seed=0)
    for end in short.extremes:
        assert float((VALUES - float(end)).abs().min()) <= end.stderr + 1e-12


def test_outliers_are_the_lone_eigenvalues(many):
    found = spectrum(operator(MATRIX), depth=16, seed=0).outliers()
    assert [float(one) for one in found[:4]] == pytest.approx([12.0, 9.0, -7.0, 6.0], abs=1e-6)
    assert len(found) < 12  # the bulk does not count


def test_outliers_do_not_see_padding():
    """Rows that ended early are filled up with nodes of weight 0, which are no neighbours."""
    nodes, weights = np.array([[0.0, 1.0, 9.0, 9.0]]), np.array([[0.5, 0.4999, 0.0001, 0.0]])
    found = Spectrum(nodes, weights, np.zeros((1, 4)), 10_000).outliers()
    assert [float(one) for one in found] == [9.0]


@pytest.mark.parametrize(("psd", "share"), [(True, 0.6), (False, 0.6)])
def test_degeneracy_is_the_share_of_zeros(psd, share):
    values = torch.cat([torch.zeros(60), torch.linspace(1, 2, 40)]).double()
    found = spectrum(operator(with_eigenvalues(values), psd=psd), depth=30, probes=20)
    # two merged nodes take in the lowest of the bulk as well: one eigenvalue more
    assert abs(float(found.degeneracy()) - share) < 4 * found.degeneracy().stderr + (
        0.0 if psd else 0.012
    )
    assert (
        float(found.degeneracy(merge=1))
        <= float(found.degeneracy(merge=2))
        <= float(found.degeneracy(merge=3))
    )
    assert found.negative_mass.value == 0.0
    for merge in (0, 31, 1.0):
        with pytest.raises((ValueError, TypeError), match="merge must be an integer in"):
            found.degeneracy(merge)


def test_density_integrates_to_one_and_has_the_moments(many):
    density = many.density(width=0.2)
    assert density.integral() == pytest.approx(1.0, abs=1e-6)
    assert (density.values >= 0).all()
    assert (density.stderr >= 0).all()
    mean = float(np.trapezoid(density.values * density.grid, density.grid))
    second = float(np.trapezoid(density.values * density.grid**2, density.grid))
    assert mean == pytest.approx(float(many.moment(1)), abs=1e-4)
    assert second == pytest.approx(float(many.moment(2)) + density.width**2, rel=1e-4)
    smooth = np.exp(-0.5 * ((density.grid[:, None] - VALUES.numpy()) / 0.2) ** 2).mean(1) / (
        0.2 * math.sqrt(2 * math.pi)
    )
    assert (np.abs(density.values - smooth) <= 5 * density.stderr + 1e-6).mean() > 0.95


def test_default_density_covers_the_support(many):
    density = many.density()
    assert density.integral() == pytest.approx(1.0, abs=1e-3)
    assert density.width == pytest.approx(0.005 * 19.0, rel=1e-6)


def test_density_of_a_single_point():
    one = Spectrum(np.full((1, 1), 4.0), np.ones((1, 1)), np.zeros((1, 1)), 5)
    assert one.density().integral() == pytest.approx(1.0, abs=1e-4)
    assert one.trace == Estimate(20.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.density(smoothing="box"), "smoothing must be one of 'gaussian'"),
        (lambda s: s.density(width=0.0), "width must be a finite number above 0"),
        (lambda s: s.density(grid=[1.0]), "grid must be a 1-D array of at least two points"),
        (lambda s: s.density(grid=np.ones((2, 2))), "grid must be a 1-D array"),
        (lambda s: s.moment(-1), "order must be an integer of at least 0"),
    ],
)
def test_readings_refuse(call, message, many):
    with pytest.raises(ValueError, match=message):
        call(many)


def test_the_density_at_a_point_is_the_expectation_of_its_gaussian():
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(7), 3)
    found = Spectrum(rng.normal(size=(3, 7)), weights, np.zeros((3, 7)), 50)
    grid, width = np.array([-1.0, 0.3, 60.0]), 0.2
    density = found.density(grid, width=width)
    for place, height, error in zip(grid, density.values, density.stderr, strict=True):
        one = found.expectation(
            lambda x, place=place: (
                np.exp(-0.5 * ((place - x) / width) ** 2) / (width * np.sqrt(2 * np.pi))
            )
        )
        assert height == pytest.approx(float(one), rel=1e-12, abs=0)
        assert error == pytest.approx(float(one.stderr), rel=1e-12, abs=0)


def test_other_sealed_documents_are_no_results(tmp_path):
    """Such as those of a checkpoint, in a folder of which a page is made; a damaged one is looked
    at.
    """
    path = tmp_path / "best.json"
    storage.write_sealed(path, {"step": 3, "loss": 0.5})
    assert not storage.is_result_file(path)
    path.write_bytes(path.read_bytes().replace(b"0.5", b"0.4"))
    assert storage.is_result_file(path)
    assert storage.is_result_file(Estimate(1.0).save(tmp_path / "x"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_result_leaves_as_frame_latex_and_dict(name):
    result = EXAMPLES[name]
    rows, frame, latex = result.table(), result.frame(), result.to_latex()
    if rows:
        assert frame["value"].tolist() == pytest.approx([r["value"] for r in rows], nan_ok=True)
        assert latex.count(r"\\") == len(rows) + 1
    assert not frame.empty, "a result has something to show"
    assert latex.count(r"\\") == len(frame) + 1
    assert latex.startswith(r"\begin{tabular}")
    assert set(result.to_dict()) == {field.name for field in dataclasses.fields(result)}


def test_a_density_is_a_frame_of_its_arrays():
    frame = EXAMPLES["Density"].frame()
    assert list(frame.columns) == ["grid", "values", "stderr"]
    assert frame["grid"].tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_arrays_of_several_dimensions_are_a_frame_with_the_places_of_their_elements():
    loss = np.arange(9.0).reshape(3, 3)
    plane = Landscape(np.array([-1.0, 0.0, 1.0]), loss).frame()
    assert list(plane.columns) == ["offsets_1", "offsets_2", "loss"]
    assert plane[(plane.offsets_1 == 0) & (plane.offsets_2 == 1)].loss.item() == loss[1, 2]
    chains = EXAMPLES["Chains"]
    frame = chains.frame()
    assert list(frame.columns[:3]) == ["chain", "draw", "losses"]
    assert frame[(frame.chain == 1) & (frame.draw == 2)].losses.item() == chains.losses[1, 2]


def test_any_result_that_is_a_folder_is_read_by_the_base_class(tmp_path):
    Measurement({"trace": Estimate(2.0)}).save(tmp_path / "measured")
    loaded = Result.load(tmp_path / "measured")
    assert isinstance(loaded, Measurement)
    assert float(loaded["trace"]) == 2.0
    (tmp_path / "other").mkdir()
    with pytest.raises(FileNotFoundError, match=r"a folder without measurement\.json"):
        Result.load(tmp_path / "other")


def test_a_number_in_latex_has_the_digits_of_its_error():
    assert r"$4.12 \pm 0.14$" in Estimate(4.123456, 0.1402).to_latex()
    assert r"$4.12346$" in Estimate(4.123456).to_latex()
    named = Measurement({"50%_of": Estimate(1.0, 30.0)}).to_latex()
    assert r"50\%\_of & $1 \pm 30$" in named


def test_pairs_are_taken_by_place_and_estimates_formatted_as_numbers():
    pairs = EXAMPLES["Eigenpairs"]
    (value, vector), expected = pairs[1], list(pairs)[1]
    assert float(value) == float(expected[0])
    assert torch.equal(vector, expected[1])
    with pytest.raises(IndexError):
        pairs[len(pairs)]
    estimate = Estimate(4.1234, 0.14)
    assert (f"{estimate:.2f}", f"{estimate}") == ("4.12", str(estimate))
