"""``python -m psm_core.demo``: train the demonstration networks again and write the files."""

from __future__ import annotations

import argparse
import dataclasses
import io
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from psm_core.demo import NETWORKS, DemoError
from psm_core.demo.data import (
    SLICE_PER_CLASS,
    SLICE_SEED,
    Images,
    find_data,
    read_images,
    slice_indices,
)
from psm_core.demo.files import (
    FILES,
    SLICE_NAME,
    read_metadata,
    sha256,
    weights_name,
    write_metadata,
)
from psm_core.demo.training import RECIPES, Epoch, count_correct, train
from psm_core.files import write_atomically

_LARGEST_SEED = 2**32 - 1
_ORIGIN = {"test": "t10k-images-idx3-ubyte", "train": "train-images-idx3-ubyte"}


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 2 bad input, 130 cancelled."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: cannot write into {options.out} ({error}); give a writable folder with --out",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("cancelled", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m psm_core.demo",
        description="Train the demonstration networks on the full Fashion-MNIST training set and "
        "write their weights, the slices of images and the metadata.",
        epilog="The result is the same for the same seed, machine, number of threads and version of PyTorch.",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder of the four Fashion-MNIST files (train-images-idx3-ubyte.gz and so on); by "
        "default the Debian package dataset-fashion-mnist, or else a download",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=FILES,
        help="folder to write to; by default that of the package",
    )
    parser.add_argument(
        "--network", choices=list(NETWORKS), help="train this network only; by default all of them"
    )
    parser.add_argument(
        "--epochs",
        type=_positive,
        metavar="N",
        help="passes over the training set; by default those of each recipe",
    )
    parser.add_argument(
        "--seed", type=_seed, metavar="S", default=0, help="seed of the training (default: 0)"
    )
    parser.add_argument(
        "--threads",
        type=_positive,
        metavar="N",
        help="threads to compute with; by default PyTorch's choice",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) > _LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {_LARGEST_SEED}")
    return int(text)


def _run(options: argparse.Namespace) -> None:
    """Read the data, write the slices, then train, measure and write each network in turn."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    folder = find_data(options.data)
    splits = {split: read_images(folder, split) for split in ("test", "train")}
    indices = {split: slice_indices(images.labels) for split, images in splits.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    data = _write_slices(options.out, splits, indices)
    networks = _kept_entries(options.out, data)
    test_slice = splits["test"].take(indices["test"])
    for name in [options.network] if options.network else list(NETWORKS):
        networks[name] = _train_and_write(name, splits, test_slice, options)
        write_metadata(options.out, {"data": data, "networks": networks})
    print(f"wrote {options.out}")


def _write_slices(out: Path, splits: dict[str, Images], indices: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write the slices' file and return its entry in the metadata."""
    arrays: dict[str, Any] = {}
    for split, images in splits.items():
        chosen = images.take(indices[split])
        arrays[f"{split}_images"] = chosen.pixels.numpy()
        arrays[f"{split}_labels"] = chosen.labels.numpy()
        arrays[f"{split}_indices"] = indices[split].numpy()
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    content = buffer.getvalue()
    write_atomically(out / SLICE_NAME, content)
    return {
        "file": SLICE_NAME,
        "sha256": sha256(content),
        "bytes": len(content),
        "source": "Fashion-MNIST, Zalando Research, MIT licence",
        "seed": SLICE_SEED,
        "per_class": SLICE_PER_CLASS,
        "indices": {
            split: f"{split}_indices are positions, from 0, in {_ORIGIN[split]} ({len(images)} images)"
            for split, images in splits.items()
        },
    }


def _kept_entries(out: Path, data: dict[str, Any]) -> dict[str, Any]:
    """The networks' entries of an earlier run in ``out``, if measured on these very slices."""
    try:
        earlier = read_metadata(out)
    except DemoError:  # none yet, or unusable: this run writes it anew
        return {}
    return dict(earlier["networks"]) if earlier["data"] == data else {}


def _train_and_write(
    name: str, splits: dict[str, Images], test_slice: Images, options: argparse.Namespace
) -> dict[str, Any]:
    """Train one network, write its weights and return its entry in the metadata."""
    recipe = RECIPES[name]
    if options.epochs is not None:
        recipe = dataclasses.replace(recipe, epochs=options.epochs)
    torch.manual_seed(options.seed)
    network = NETWORKS[name].build()
    start = time.perf_counter()
    train(network, splits["train"], recipe, options.seed, lambda epoch: _print_epoch(name, epoch))
    seconds = time.perf_counter() - start
    content = safetensors.torch.save(network.state_dict())
    write_atomically(options.out / weights_name(name), content)
    test = _accuracy(count_correct(network, splits["test"]), len(splits["test"]))
    print(
        f"{name}: test accuracy {test['accuracy']:.2%} on {test['images']} images, {seconds:.0f} s",
        flush=True,
    )
    return {
        "file": weights_name(name),
        "sha256": sha256(content),
        "bytes": len(content),
        "parameters": sum(p.numel() for p in network.parameters()),
        "test": test,
        "slice": _accuracy(count_correct(network, test_slice), len(test_slice)),
        "training": {
            **dataclasses.asdict(recipe),
            "images": len(splits["train"]),
            "seed": options.seed,
            "threads": torch.get_num_threads(),
            "seconds": round(seconds, 1),
        },
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "numpy", "safetensors")},
        },
    }


def _accuracy(correct: int, images: int) -> dict[str, float]:
    return {"correct": correct, "images": images, "accuracy": correct / images}


def _print_epoch(name: str, epoch: Epoch) -> None:
    print(
        f"{name}: epoch {epoch.number}/{epoch.total}, train loss {epoch.loss:.4f}, {epoch.seconds:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
