"""Checkpoints: what is packed comes back, and what goes wrong on disk is said and costs only the
newest.
"""

import collections
import errno
import json
import math
import multiprocessing
import os
import time
import warnings

import numpy as np
import pytest
import torch

from lambdahat._core.storage import Damaged
from lambdahat.training import Checkpoints, history
from lambdahat.training.checkpoints import DamagedCheckpoint, alone_in, pack, read, unpack
from lambdahat.training.history import Metrics, read_rows
from tests.training.small_runs import TRAIN, Setup, same, timeless

STATE = {
    "numbers": [1, 2.5, -0.0, 1e-320, math.inf, True, None, "text", "λ"],
    "tuple": (1, (2,)),
    "by number": {0: {"momentum": torch.arange(3.0), "step": 4}, 1: {}},
    "counter": collections.Counter({3: 2}),
    "bfloat": torch.tensor([1.5, math.nan], dtype=torch.bfloat16),
    "integer": torch.tensor(7),
    "bytes": torch.get_rng_state(),
    "empty": torch.zeros(0, 3),
    "bool": torch.tensor([True, False]),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "channels last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "every other": torch.arange(6.0)[::2],
    "numpy": np.float64(0.1),
    "dtype": torch.float16,
    "device": torch.device("cpu"),
}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    """Nobody pulls the plug here: what the system has taken is as good as on the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def through_disk(state, folder):
    checkpoints = Checkpoints(folder)
    return read(checkpoints.write(0, state))[1]


def assert_equal(first, second):
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert first.stride() == second.stride() or first.stride() == (2,)  # gaps are not kept
        assert (
            torch.equal(first.nan_to_num(9), second.nan_to_num(9))
            if first.is_floating_point()
            else first.equal(second)
        )
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            assert_equal(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_equal(one, other)
    else:
        assert repr(first) == repr(second)


@pytest.mark.parametrize("key", STATE)
def test_states_come_back(key, tmp_path):
    expected = float(STATE[key]) if key == "numpy" else STATE[key]
    assert_equal(expected, unpack(*pack(STATE[key])))
    assert_equal({"part": expected}, through_disk({"part": STATE[key]}, tmp_path))


def test_shared_tensors_are_stored_once_and_views_whole(tmp_path):
    tensor = torch.arange(6.0)
    tensors, _ = pack({"first": tensor, "second": tensor})
    assert list(tensors) == ["first"]
    back = through_disk(
        {"all": tensor, "same": tensor, "part": tensor[2:4], "row": tensor.view(2, 3)[1]}, tmp_path
    )
    assert back["part"].tolist() == [2.0, 3.0]
    assert back["row"].tolist() == [3.0, 4.0, 5.0]
    back["all"].zero_()
    assert back["same"].tolist() == tensor.tolist()


def test_what_cannot_be_kept_is_named():
    with pytest.raises(TypeError, match=r"optimizer/state/0/hook must be a tensor.*got <function"):
        pack({"optimizer": {"state": {0: {"hook": lambda: 0}}}})
    with pytest.raises(TypeError, match="a key of state must be text or a number"):
        pack({"state": {torch.ones(1): 1}})
    with pytest.raises(ValueError, match="document must be one that pack"):
        unpack({}, {"pickle": "…"})


def test_optimiser_states_come_back(tmp_path):
    setup = Setup("adam")
    setup.fit(1)
    expected = setup.optimizer.state_dict()
    assert_equal(expected, through_disk(expected, tmp_path))


def damage_json(path):
    path.write_text(path.read_text()[:-20])


def damage_tensors(path):
    blob = path.with_suffix(".safetensors").read_bytes()
    path.with_suffix(".safetensors").write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))


def truncate_tensors(path):
    path.with_suffix(".safetensors").write_bytes(
        path.with_suffix(".safetensors").read_bytes()[:100]
    )


def empty_json(path):
    path.write_bytes(b"")


def other_json(path):
    path.write_text(json.dumps({"format": "other"}))


def lose_tensors(path):
    path.with_suffix(".safetensors").unlink()


def lose_state(path):
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "state": {"tensor": "nowhere"}}))


def change_a_number(path):
    """A setting of the optimiser, changed in one digit, would resume to other weights."""
    text = path.read_text()
    assert '["dampening", 0]' in text
    path.write_text(text.replace('["dampening", 0]', '["dampening", 1]'))


DAMAGES = [
    change_a_number,
    damage_json,
    damage_tensors,
    truncate_tensors,
    empty_json,
    other_json,
    lose_tensors,
    lose_state,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(damage, tmp_path):
    whole = Setup("sgd")
    run = whole.fit(3, tmp_path)
    newest = Checkpoints(tmp_path / "checkpoints").paths()[-1]
    damage(newest)
    with pytest.raises(DamagedCheckpoint, match="step-00000015"):
        read(newest)
    setup = Setup("sgd")
    with pytest.warns(RuntimeWarning, match=r"step-00000015.*resuming from step-00000010\.json"):
        again = setup.fit(3, tmp_path, resume=True)
    assert same(setup.tensors, whole.tensors)
    assert timeless(again.history) == timeless(run.history)
    assert read(newest)[0] == 15


def test_all_damaged_is_an_error_and_nothing_is_lost(tmp_path):
    Setup("sgd").fit(3, tmp_path)
    for path in Checkpoints(tmp_path / "checkpoints").paths():
        damage_tensors(path)
    rows = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(
        ValueError, match=r"folder must hold a whole checkpoint, got .*step-00000015.*step-00000010"
    ):
        Setup("sgd").fit(3, tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == rows


def test_lost_rows_send_the_run_back_to_a_checkpoint_that_has_its_own(tmp_path):
    whole = Setup("sgd")
    run = whole.fit(3, tmp_path)
    rows = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(rows[:-5])
    setup = Setup("sgd")
    with pytest.warns(RuntimeWarning, match=r"counts on rows that metrics.jsonl does not hold"):
        again = setup.fit(3, tmp_path, resume=True)
    assert same(setup.tensors, whole.tensors)
    assert timeless(again.history) == timeless(run.history)


def test_a_damaged_row_is_left_out_by_name(tmp_path):
    whole = Setup("sgd")
    run = whole.fit(3, tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[0] = lines[0].replace(b'"epoch": 1', b'"epoch": 3')
    path.write_bytes(b"".join(lines))
    with pytest.raises(Damaged, match=r"metrics\.jsonl, line 1, is damaged"):
        read_rows(path)
    with pytest.warns(
        RuntimeWarning, match=r"metrics\.jsonl, line 1, is damaged.*these rows are left out"
    ):
        again = Setup("sgd").fit(4, tmp_path, resume=True)
    assert timeless(again.history)[:2] == timeless(run.history)[1:]
    assert timeless(read_rows(path)) == timeless(again.history)


def test_a_damaged_word_for_the_best_is_named(tmp_path):
    Setup("sgd").fit(2, tmp_path)
    path = tmp_path / "checkpoints" / "best.json"
    path.write_text(path.read_text().replace("step-00000010", "step-00000005"))
    with pytest.raises(Damaged, match=r"best\.json is damaged"):
        Checkpoints(tmp_path / "checkpoints").best()


def test_checkpoints_and_rows_of_earlier_versions_are_read(tmp_path):
    """They had no digest of the JSON itself."""
    whole = Setup("sgd")
    run = whole.fit(3, tmp_path / "whole")
    Setup("sgd").fit(2, tmp_path / "old")
    lengths = {}
    rows = [
        json.loads(line) for line in (tmp_path / "old" / "metrics.jsonl").read_text().splitlines()
    ]
    text = ""
    for row in rows:
        del row["digest"]
        text += json.dumps(row) + "\n"
        lengths[row["step"]] = len(text)
    (tmp_path / "old" / "metrics.jsonl").write_text(text)
    for path in (tmp_path / "old" / "checkpoints").glob("*.json"):
        document = json.loads(path.read_text())
        del document["digest"]
        for pair in document.get("state", {}).get("dict", []):
            if pair[0] == "metrics":
                pair[1] = lengths[document["step"]]
        path.write_text(
            json.dumps({**document, "version": 1} if "version" in document else document)
        )
    setup = Setup("sgd")
    again = setup.fit(3, tmp_path / "old", resume=True)
    assert same(setup.tensors, whole.tensors)
    assert timeless(again.history) == timeless(run.history)


@pytest.mark.parametrize("what", ["one label", "one pixel", "rounding"])
def test_a_run_does_not_go_on_with_other_data(what, tmp_path):
    Setup("sgd").fit(1, tmp_path)
    setup = Setup("sgd")
    (x, y) = (part.clone() for part in TRAIN)
    if what == "one label":
        y[-1] = (y[-1] + 1) % 10
    elif what == "one pixel":
        x[-1, 30] += 1.0
    else:
        x *= 1 + 1e-7 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    setup.problem = setup.problem.on((x, y))
    if what == "rounding":  # another machine may prepare the data a little differently
        assert len(setup.fit(2, tmp_path, resume=True)) == 2
    else:
        with pytest.raises(
            ValueError, match="folder must hold a run on the same data, got one on other samples or"
        ):
            setup.fit(2, tmp_path, resume=True)


@pytest.mark.parametrize("lost", [True, False])
def test_damaged_initial_parameters_are_named(lost, tmp_path):
    Setup("sgd").fit(1, tmp_path)
    path = tmp_path / "checkpoints" / "initial.safetensors"
    path.unlink() if lost else path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(
        ValueError,
        match=f"folder must hold the initial parameters.*{'missing' if lost else 'damaged'}",
    ):
        Setup("sgd").fit(2, tmp_path, resume=True)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("when", ["tensors", "json", "best.json"])
def test_a_full_or_read_only_disk_is_an_error_and_the_run_goes_on_later(
    code, when, tmp_path, monkeypatch
):
    """The write of the third epoch fails half-way: the second's checkpoint is whole and the run
    resumes from it.
    """
    real_replace = os.replace
    suffix = {
        "tensors": "step-00000015.safetensors",
        "json": "step-00000015.json",
        "best.json": "best.json",
    }[when]
    full = []

    def replace(source, target):
        if str(target).endswith(suffix) and (when != "best.json" or full):
            raise OSError(code, os.strerror(code), str(target))
        if str(target).endswith("step-00000015.json"):
            full.append(True)
        real_replace(source, target)

    whole = Setup("sgd")
    run = whole.fit(3, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(
            OSError, match=r"checkpoint of step 15 could not be written.*is whole.*make room"
        ) as caught:
            Setup("sgd").fit(3, tmp_path / "parts")
    assert caught.value.errno == code
    assert not list((tmp_path / "parts" / "checkpoints").glob(".*"))
    found = Checkpoints(tmp_path / "parts" / "checkpoints").newest()
    assert found.step == (15 if when == "best.json" else 10)
    setup = Setup("sgd")
    again = setup.fit(3, tmp_path / "parts", resume=True)
    assert same(setup.tensors, whole.tensors)
    assert timeless(again.history) == timeless(run.history)


def test_a_folder_that_cannot_be_written_is_an_error_before_training(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    setup = Setup("sgd")
    before = setup.tensors
    with pytest.raises(OSError, match=r"folder must be one that can be written to, got .*file"):
        setup.fit(1, tmp_path / "file")

    def refuse(*arguments, **named):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(
        OSError, match=r"folder must be one that can be written to.*\(Permission denied\)"
    ):
        setup.fit(1, tmp_path / "new")
    assert same(setup.tensors, before)


def test_a_best_that_was_not_yet_named_is_named_on_resuming(tmp_path):
    """Killed between the checkpoint and the word that it is the best."""
    Setup("sgd").fit(2, tmp_path)
    (tmp_path / "checkpoints" / "best.json").write_text(
        json.dumps({"checkpoint": "step-00000005.json"})
    )
    Setup("sgd").fit(2, tmp_path, resume=True)
    assert Checkpoints(tmp_path / "checkpoints").best().name == "step-00000010.json"


def test_only_temporaries_of_its_own_are_removed(tmp_path):
    folder = tmp_path / "checkpoints"
    (folder / ".ipynb_checkpoints").mkdir(parents=True)
    (folder / ".gitignore").write_text("*")
    for name in (".step-00000001.json.a1b2_c3d", ".best.json.x", ".initial.safetensors.y"):
        (folder / name).write_text("")
    Setup("sgd").fit(1, tmp_path)
    assert {path.name for path in folder.glob(".*")} == {".ipynb_checkpoints", ".gitignore"}


def test_one_run_at_a_time_in_a_folder(tmp_path):
    hears, tells = os.pipe()

    def hold():
        with alone_in(tmp_path):
            os.write(tells, b".")
            time.sleep(60)

    child = multiprocessing.get_context("fork").Process(target=hold)
    with warnings.catch_warnings():  # Python 3.12 warns of threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    os.read(hears, 1)
    with pytest.raises(
        ValueError, match=r"folder must have one run at a time, got .*where another is running"
    ):
        Setup("sgd").fit(1, tmp_path)
    child.kill()
    child.join()
    assert len(Setup("sgd").fit(1, tmp_path)) == 1


def test_rows_that_do_not_fit_on_the_disk_are_an_error(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(history, "append_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            Setup("sgd").fit(1, tmp_path)
    run = Setup("sgd").fit(2, tmp_path, resume=True)
    assert len(run) == 2


def test_metrics_cut_and_gain_columns(tmp_path):
    first = Metrics(tmp_path)
    first.add({"step": 1, "loss": 0.5})
    length = first.length
    first.add({"step": 2, "loss": math.inf, "trace": 1.0, "note": 'a, "b"'})
    assert (
        tmp_path / "metrics.csv"
    ).read_text() == 'step,loss,trace,note\n1,0.5,,\n2,,1.0,"a, ""b"""\n'
    with open(tmp_path / "metrics.jsonl", "ab") as stream:
        stream.write(b'{"step": 3, "lo')  # a writer that was killed
    second = Metrics(tmp_path)
    assert second.length >= length
    assert second.length < 10_000
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]
    second.cut(length)
    assert second.rows == [{"step": 1, "loss": 0.5}]
    second.add({"step": 2, "loss": 0.25})
    assert [row["loss"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0.5, 0.25]
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n1,0.5\n2,0.25\n"


def test_files_of_a_run_are_never_written_through_links(tmp_path):
    """As in a folder that somebody else prepared."""
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("precious")
    run.mkdir()
    for name in (".lock", "metrics.jsonl", "metrics.csv"):
        (run / name).symlink_to(precious)
    with alone_in(run):
        pass
    with pytest.raises(OSError, match="symbolic links"):
        Metrics(run).add({"epoch": 0, "loss": 1.0})
    assert precious.read_text() == "precious"
