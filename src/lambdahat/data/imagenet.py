"""ImageNet: the 32 × 32 version in memory, and folders of pictures read one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lambdahat._core.check import require, require_choice, require_count
from lambdahat._core.progress import report
from lambdahat._core.storage import read_arrays
from lambdahat.data.cifar import Part, checked, entries
from lambdahat.data.files import CURE
from lambdahat.data.splits import Split, image_split, scaled
from lambdahat.data.unpickling import unpickle

CLASSES = 1000
BATCHES = [f"train_data_batch_{i}" for i in range(1, 11)]
SUFFIXES = {".jpeg", ".jpg", ".png"}
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def imagenet32_files(folder: Path, normalization: str) -> Split:
    """Ten batches and ``val_data``, each .npz or pickled, as images (n, 3, 32, 32) (Chrabaszcz
    et al., 2017).
    """
    parts = []
    for i, name in enumerate([*BATCHES, "val_data"]):
        parts.append(_read_small(folder, name))
        report("imagenet32", i + 1, len(BATCHES) + 1)
    images = np.concatenate([part[0] for part in parts[:-1]])
    labels = np.concatenate([part[1] for part in parts[:-1]])
    # a pickled array is a view of the file
    held_out = np.require(parts[-1][0], requirements="W"), parts[-1][1]
    return image_split((images, labels), held_out, CLASSES, normalization)


def _read_small(folder: Path, name: str) -> Part:
    path = next((path for path in (folder / f"{name}.npz", folder / name) if path.is_file()), None)
    require(
        path is not None, "folder", f"hold {name} or {name}.npz", str(folder), "", FileNotFoundError
    )
    assert path is not None
    batch: dict[str, Any] = read_arrays(path) if path.suffix == ".npz" else unpickle(path)
    for key in ("data", "labels"):
        require(key in batch, str(path), f"have the entry {key!r}", entries(batch), CURE)
    return checked(batch["data"], batch["labels"], path, CLASSES, first=1)


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Pictures in one folder per class, read when asked for: (image (3, size, size), label).

    Classes are the folders in alphabetical order. A picture's shorter side is scaled to
    size·256/224 and its middle cut out. ``normalization``: "unit", "symmetric", or "standard" with
    the customary mean and deviation of ImageNet. Needs Pillow.
    """

    def __init__(
        self, folder: str | Path, size: int = 224, normalization: str = "standard"
    ) -> None:
        self.folder, self.size = Path(folder), require_count(size, "size")
        self.normalization = require_choice(
            normalization, "normalization", ("unit", "symmetric", "standard")
        )
        require(
            self.folder.is_dir(),
            "folder",
            "be a folder of one folder per class",
            f"{folder} (no such folder)",
            "",
            FileNotFoundError,
        )
        self.classes = sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        self.samples = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((self.folder / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        found = {label for _, label in self.samples}
        empty = [name for label, name in enumerate(self.classes) if label not in found]
        require(
            bool(self.samples) and not empty,
            "folder",
            "hold one folder of pictures for each class",
            f"{self.folder} with {', '.join(empty[:3]) + ' empty' if empty else 'no folders'}",
        )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        pixels = torch.from_numpy(self._read(path)).permute(2, 0, 1).unsqueeze(0)
        shift, scale = {
            "unit": (torch.zeros(3), torch.full((3,), 255.0)),
            "symmetric": (torch.full((3,), 127.5), torch.full((3,), 127.5)),
            "standard": (255 * torch.tensor(MEAN), 255 * torch.tensor(DEVIATION)),
        }[self.normalization]
        return scaled(pixels, shift, scale)[0], label

    def _read(self, path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
        from PIL import Image

        try:
            with Image.open(path) as picture:
                whole = picture.convert("RGB")
        except (OSError, SyntaxError) as error:
            raise ValueError(
                f"{path} must be a whole picture, got {error}; replace or remove it"
            ) from None
        short = self.size * 256 / 224 / min(whole.size)
        width, height = (max(self.size, round(side * short)) for side in whole.size)
        left, top = (width - self.size) // 2, (height - self.size) // 2
        resized = whole.resize((width, height), Image.Resampling.BILINEAR)
        return np.array(
            resized.crop((left, top, left + self.size, top + self.size)), dtype=np.uint8
        )
