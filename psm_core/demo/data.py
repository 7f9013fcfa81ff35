"""Fashion-MNIST in its original IDX files: finding them, reading them, cutting the slices.

The IDX format is a big-endian header (two zero bytes, a type code, the number of dimensions, then
one 32-bit size per dimension) followed by the raw values; the files are usually gzipped.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from psm_core.demo.files import DemoError
from psm_core.demo.networks import INPUT_SHAPE

CLASSES: tuple[str, ...] = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
"""Names of the ten classes; the position is the label."""

SLICE_PER_CLASS = 200
"""Images of each class in a slice."""

SLICE_SEED = 0
"""Seed of the choice of the slices' images; fixed, so every training run ships the same slices."""

DATA_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where the Debian package ``dataset-fashion-mnist`` puts the files."""

_FILE_STEMS = {"train": "train", "test": "t10k"}
_UNSIGNED_BYTE = 0x08


@dataclass(frozen=True)
class Images:
    """Labelled images.

    Attributes:
        pixels: uint8, (N, 1, 28, 28).
        labels: int64, (N,), from 0 to 9.
    """

    pixels: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: torch.Tensor) -> Images:
        """The images at ``indices`` (int64, any length), in that order."""
        return Images(self.pixels[indices], self.labels[indices])


def find_data(folder: Path | None) -> Path:
    """The folder that holds the IDX files, downloading them where no copy is installed.

    Args:
        folder: where to look and nowhere else; None tries `DATA_FOLDER`, then downloads with
            torchvision into torch's cache.

    Raises:
        DemoError: the folder does not exist, or the download failed.
    """
    if folder is not None:
        if not folder.is_dir():
            raise DemoError(
                f"the data folder {folder} does not exist; "
                "give the folder of the Fashion-MNIST files with --data"
            )
        return folder
    if DATA_FOLDER.is_dir():
        return DATA_FOLDER
    return _download(Path(torch.hub.get_dir()) / "datasets")


def _download(root: Path) -> Path:
    """Download the files below ``root`` with torchvision and return their folder."""
    try:
        from torchvision.datasets import FashionMNIST  # type: ignore[import-untyped]

        return Path(FashionMNIST(str(root), download=True).raw_folder)
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DemoError(
            f"Fashion-MNIST is not installed and its download failed ({reason}); install the "
            "Debian package dataset-fashion-mnist or give the folder of the files with --data"
        ) from error


def read_images(folder: Path, split: str) -> Images:
    """Read one split, "train" or "test", from the IDX files in ``folder``.

    Raises:
        DemoError: a file is missing, damaged, or not what its name says.
    """
    stem = _FILE_STEMS[split]
    pixels = _read_idx(folder, f"{stem}-images-idx3-ubyte")
    labels = _read_idx(folder, f"{stem}-labels-idx1-ubyte")
    if pixels.shape[1:] != INPUT_SHAPE[1:] or labels.dim() != 1 or len(pixels) != len(labels):
        raise DemoError(
            f"the {split} files in {folder} hold images {tuple(pixels.shape)} and labels "
            f"{tuple(labels.shape)}; expected (N, 28, 28) and (N,); install or download them again"
        )
    if len(labels) == 0 or int(labels.max()) >= len(CLASSES):
        raise DemoError(
            f"the {split} labels in {folder} must be from 0 to {len(CLASSES) - 1}; "
            "the file is damaged, install or download it again"
        )
    return Images(pixels.unsqueeze(1), labels.long())


def _read_idx(folder: Path, name: str) -> torch.Tensor:
    """The array of bytes in the IDX file ``name``, gzipped or not, as a uint8 tensor."""
    path = next((p for p in (folder / f"{name}.gz", folder / name) if p.is_file()), None)
    if path is None:
        raise DemoError(
            f"{folder} has no file {name}.gz; give the folder of the Fashion-MNIST files with --data"
        )
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, code, dimensions = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
        values = torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * dimensions)
        if zeros != 0 or code != _UNSIGNED_BYTE:
            raise ValueError("its header is not that of an IDX file of bytes")
        return values.reshape(shape)
    except (OSError, EOFError, ValueError, RuntimeError, struct.error, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise DemoError(
            f"the data file {path} is damaged ({reason}); install or download it again"
        ) from error


def slice_indices(labels: torch.Tensor) -> torch.Tensor:
    """Positions of `SLICE_PER_CLASS` images of each class, ascending, chosen by `SLICE_SEED`.

    Args:
        labels: int64, (N,), the labels of a whole split.

    Raises:
        DemoError: a class has too few images.
    """
    generator = torch.Generator().manual_seed(SLICE_SEED)
    chosen = []
    for label, name in enumerate(CLASSES):
        positions = torch.nonzero(labels == label).flatten()
        if len(positions) < SLICE_PER_CLASS:
            raise DemoError(
                f"the data has {len(positions)} images of class {name}; expected {SLICE_PER_CLASS} or more"
            )
        chosen.append(positions[torch.randperm(len(positions), generator=generator)[:SLICE_PER_CLASS]])
    return torch.cat(chosen).sort().values
