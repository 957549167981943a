"""ImageNet's code paths on small files in the standard formats: 32 × 32 batches, and folders of
pictures.
"""

import pytest
import torch

from lambdahat.experiments import kit
from lambdahat.experiments.averaging import gadam_imagenet
from lambdahat.experiments.averaging.gadam_imagenet import picture_task
from lambdahat.experiments.kit.cells import Rows
from tests.data.test_imagenet import write_small


@pytest.fixture
def pictures(tmp_path):
    """train and val with two classes of single-coloured pictures, which a network tells apart."""
    Image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 8), ("val", 4)):
        for name, colour in (("n01", (250, 20, 20)), ("n02", (20, 20, 250))):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                shade = tuple(min(255, value + 3 * i) for value in colour)
                Image.new("RGB", (40, 36), shade).save(folder / f"{i}.png")
    return tmp_path


def small_cells(folder="", data="imagenet32", epochs=3, side=0):
    images = kit.image_setting(data, 16, 2, epochs, side=side, batch=8)
    return gadam_imagenet.cells(images, ["VGG-4×2-BN"], seeds=1, more_seeds=1, folder=folder)


def test_imagenet_at_32_pixels_is_read_standardised_and_trained_on(tmp_path):
    write_small(tmp_path, "npz")
    cells = small_cells(str(tmp_path))
    assert [cell["run"] for cell in cells] == [*gadam_imagenet.RUNS, *gadam_imagenet.MORE]
    task = picture_task(cells[0], "cpu")
    x, y = task.problem.batches.first().data
    assert tuple(x.shape) == (16, 3, 32, 32)
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std((0, 2, 3)), torch.ones(3))
    assert int(y.max()) == 999
    assert task.model[-1].out_features == 1000
    rows = gadam_imagenet.run(next(cell for cell in cells if cell["run"] == "GadamX"), "cpu")
    end = rows[-1]
    assert end["kind"] == "end"
    assert end["averaged"]
    assert end["top 5"] >= end["accuracy"]


def test_folders_of_pictures_are_read_one_by_one_and_learnt(pictures):
    cells = small_cells(str(pictures), "imagenet", epochs=6, side=16)
    cells = [cell for cell in cells if cell["run"] in ("SGD", "SGD IA")]
    rows = []
    for cell in cells:
        rows += [{**cell, **row} for row in gadam_imagenet.run(cell, "cpu")]
    ends = Rows(rows).where(kind="end")
    assert ends.values("accuracy") == [100.0, 100.0]
    assert ends.values("top 5") == [100.0, 100.0]  # of two classes
    assert [row["averaged"] for row in ends] == [False, True]


def test_a_folder_must_be_named_and_have_one_set_of_classes(pictures):
    cell = small_cells(data="imagenet", side=16)[0]
    with pytest.raises(ValueError, match="folder must name the folder above train and val"):
        picture_task(cell, "cpu")
    (pictures / "val" / "n02").rename(pictures / "val" / "n03")
    with pytest.raises(ValueError, match="folder must have the same classes in train and val"):
        picture_task({**cell, "folder": str(pictures)}, "cpu")


def test_a_stand_in_says_so_in_its_table(tmp_path):
    end = {
        "kind": "end",
        "network": "N",
        "parameters": 5,
        "seed": 0,
        "accuracy": 1.0,
        "top 5": 2.0,
        "iterate accuracy": 1.0,
        "training accuracy": 1.0,
    }
    for data, expected in (("digits", True), ("imagenet32", False)):
        rows = Rows([{**end, "data": data, "run": name} for name in gadam_imagenet.RUNS])
        assert (
            "in place of ImageNet" in gadam_imagenet.EXPERIMENT.tables(rows)[0].title
        ) is expected


def test_the_configurations_of_the_thesis_are_whole():
    for wanted in (gadam_imagenet.IMAGENET_32, gadam_imagenet.IMAGENET):
        assert len(wanted) == 3 * (len(gadam_imagenet.RUNS) + len(gadam_imagenet.MORE))
    assert {cell["first"] for cell in gadam_imagenet.IMAGENET} == {60}


def test_a_table_and_charts_for_each_network():
    end = {
        "kind": "end",
        "data": "cifar10",
        "parameters": 5,
        "seed": 0,
        "accuracy": 1.0,
        "top 5": 2.0,
        "iterate accuracy": 1.0,
        "training accuracy": 1.0,
    }
    networks = Rows(gadam_imagenet.EXPERIMENT.grid("paper")).distinct("network")
    rows = Rows(
        [
            {**end, "network": network, "run": name}
            for network in networks
            for name in gadam_imagenet.TABLE
        ]
    )
    tables = gadam_imagenet.EXPERIMENT.tables(rows)
    assert [table.title.split(",")[0] for table in tables] == list(networks)
    assert [table.header[-1] for table in tables] == [
        "thesis, ImageNet 32 × 32, PRN-110",
        "thesis, ImageNet 32 × 32, WRN-28-10",
    ]
    assert [table.rows[0][-1] for table in tables] == ["54.27, 77.96", "61.33, 83.52"]
    assert len(gadam_imagenet.EXPERIMENT.charts(rows)) == 2 * len(
        gadam_imagenet.EXPERIMENT.charts(rows.where(network=networks[0]))
    )


def test_at_paper_scale_cells_are_network_by_run_by_seed():
    cells = gadam_imagenet.EXPERIMENT.grid("paper")
    first, second = (
        [cell["run"] for cell in cells if cell["network"] == name]
        for name in Rows(cells).distinct("network")
    )
    assert sorted(first) == sorted(3 * [*gadam_imagenet.RUNS, *gadam_imagenet.MORE])
    assert sorted(second) == sorted(3 * gadam_imagenet.TABLE)
    assert {cell["precision"] for cell in cells} == {"bfloat16"}
    assert not any("precision" in cell for cell in gadam_imagenet.EXPERIMENT.grid("cpu"))
