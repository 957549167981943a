"""``lambdahat data``."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from lambdahat.cli.app import app
from lambdahat.data import CATALOGUE
from lambdahat.data.image_files import NAMES
from tests.data.standard_files import published, write_handwriting


def call(*arguments):
    return CliRunner().invoke(app, ["data", *(str(argument) for argument in arguments)])


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty data folder, and a small MNIST as the published one, of which there is no source."""
    write_handwriting(tmp_path / "original")
    entry = published(
        CATALOGUE["mnist"], tmp_path / "original", (7, 5), CATALOGUE["mnist"].sources[:0]
    )
    monkeypatch.setitem(CATALOGUE, "mnist", entry)
    monkeypatch.setenv("LAMBDAHAT_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_list_names_every_data_set_and_where_it_is(folder):
    write_handwriting(folder / "mnist")
    result = call("list")
    assert result.exit_code == 0
    rows = {line.split()[0]: line for line in result.stdout.splitlines()[2:]}
    assert set(rows) == set(CATALOGUE)
    assert rows["mnist"].endswith(str(folder / "mnist"))
    assert rows["cifar10"].endswith("not found")
    assert rows["digits"].endswith("bundled")
    (folder / "mnist" / NAMES[1]).unlink()
    listed = {row["name"]: row for row in json.loads(call("list", "--json").stdout)}
    assert listed["mnist"]["where"] == f"{folder / 'mnist'} (without {NAMES[1]})"
    assert listed["mnist"]["counts"] == [7, 5]


def test_check_tells_right_from_wrong_and_missing(folder):
    assert call("check").stdout == "no data sets here\n"
    write_handwriting(folder / "mnist")
    assert call("check").exit_code == 0
    assert call("check", "mnist", "digits").exit_code == 0
    (folder / "mnist" / NAMES[1]).write_bytes(b"\0")
    result = call("check", "mnist", "cifar10", "--json")
    assert result.exit_code == 1
    assert [row["state"] for row in json.loads(result.stdout)] == ["wrong", "missing"]
    wrong, missing = result.stderr.strip().splitlines()
    assert f"{NAMES[1]} must hold 15 bytes, got 1; fetch it again" in wrong
    assert "run `lambdahat data fetch cifar10`" in missing
    quiet = call("check", "mnist", "--quiet")
    assert (quiet.exit_code, quiet.stdout) == (1, "")


def test_check_says_where_there_is_nothing_to_check_against(folder, monkeypatch):
    small = tuple(replace(file, size=12) for file in CATALOGUE["cifar10"].forms[1])
    monkeypatch.setitem(CATALOGUE, "cifar10", replace(CATALOGUE["cifar10"], forms=(small,)))
    for name in ("cifar10", "imagenet32"):
        (folder / name).mkdir(parents=True)
        for file in CATALOGUE[name].forms[0]:
            (folder / name / file.name).write_bytes(bytes(12))
    result = call("check", "--json")
    assert result.exit_code == 0
    assert [row["state"] for row in json.loads(result.stdout)] == ["no published checksum"] * 2
    cifar, imagenet = result.stderr.strip().splitlines()
    assert (
        "cifar10: no published checksum of data_batch_1.bin … test_batch.bin; their sizes are right"
        in cifar
    )
    assert (
        "imagenet32: no published checksum of train_data_batch_1.npz … val_data.npz; they are there"
        in imagenet
    )
    assert "no published checksum" in call("check").stdout
    (folder / "imagenet32" / "val_data.npz").write_bytes(b"")
    (folder / "cifar10" / "test_batch.bin").write_bytes(bytes(11))
    result = call("check", "--json")
    assert result.exit_code == 1
    assert [row["state"] for row in json.loads(result.stdout)] == ["wrong", "wrong"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fetch", "nothing"), "error: data set must be one of 'digits', 'xord'"),
        (("fetch", "mnst"), "got 'mnst'; did you mean 'mnist'?"),
        (("check", "nothing"), "error: data set must be one of 'digits', 'xord'"),
        (("fetch", "digits"), "error: name must be a data set that is not bundled"),
        (
            ("fetch", "mnist", "--mirror", "ftp://x"),
            "url must begin with http:// or https://, got ftp://x/train-images",
        ),
        (
            ("fetch", "mnist", "--mirror", "http://127.0.0.1:9"),
            "error: mnist could not be fetched. Tried http://127",
        ),
        (
            ("check", "mnist", "--folder", "/nowhere"),
            "mnist: folder must be a folder, got /nowhere",
        ),
    ],
)
def test_errors_are_one_line(arguments, message):
    result = call(*arguments)
    assert result.exit_code == (1 if "--folder" in arguments else 2), result.output
    (line,) = result.stderr.strip().splitlines()
    assert message in line


def test_fetch_says_where_the_files_are(folder):
    write_handwriting(folder / "mnist")  # all right already: nothing is asked of the mirror
    result = call("fetch", "mnist", "--mirror", "http://127.0.0.1:9")
    assert (result.exit_code, result.stdout) == (0, f"mnist: {folder / 'mnist'}\n")
