"""The shipped demonstration networks and images, and the command that makes them."""

from __future__ import annotations

import gzip
import io
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from psm_core import demo
from psm_core.demo.__main__ import main
from psm_core.demo.data import DATA_FOLDER, Images, read_images, slice_indices
from psm_core.demo.files import (
    FILES,
    SLICE_NAME,
    DemoError,
    read_checked,
    read_metadata,
    sha256,
)
from psm_core.demo.networks import PIXEL_MEAN, PIXEL_STD
from psm_core.demo.training import augment, count_correct
from psm_core.files import write_atomically

CNN_PARAMETERS = 1_180_074
MLP_PARAMETERS = 669_706
MEGABYTE = 1_000_000

whole_data_set = pytest.mark.skipif(not DATA_FOLDER.is_dir(), reason="the full data set is not installed")


def write_idx(folder: Path, name: str, values: torch.Tensor) -> None:
    """Write bytes as a gzipped IDX file, independently of the reader under test."""
    header = struct.pack(">HBB", 0, 8, values.dim()) + struct.pack(f">{values.dim()}I", *values.shape)
    (folder / f"{name}.gz").write_bytes(gzip.compress(header + values.numpy().tobytes()))


@pytest.fixture
def small_data(tmp_path: Path) -> Path:
    """A folder of IDX files that hold the shipped slices as if they were the whole data set."""
    folder = tmp_path / "data"
    folder.mkdir()
    for split, stem in (("train", "train"), ("test", "t10k")):
        images, labels = demo.load_images(split)
        write_idx(folder, f"{stem}-images-idx3-ubyte", images[:, 0])
        write_idx(folder, f"{stem}-labels-idx1-ubyte", labels.to(torch.uint8))
    return folder


def test_files_are_small_and_as_described() -> None:
    metadata = read_metadata()
    assert sum(path.stat().st_size for path in FILES.iterdir()) <= 11 * MEGABYTE
    assert set(metadata["networks"]) == set(demo.NETWORKS)
    for entry in (metadata["data"], *metadata["networks"].values()):
        content = (FILES / entry["file"]).read_bytes()
        assert (sha256(content), len(content)) == (entry["sha256"], entry["bytes"])


@pytest.mark.parametrize("split", ["test", "train"])
def test_slice_is_balanced(split: str) -> None:
    images, labels = demo.load_images(split)
    assert (images.dtype, tuple(images.shape)) == (torch.uint8, (2000, 1, 28, 28))
    assert (labels.dtype, tuple(labels.shape)) == (torch.int64, (2000,))
    assert torch.bincount(labels, minlength=len(demo.CLASSES)).tolist() == [200] * len(demo.CLASSES)


def test_slices_do_not_overlap() -> None:
    both = torch.cat([demo.load_images(split)[0] for split in ("test", "train")]).flatten(1)
    assert len({row.numpy().tobytes() for row in both}) == len(both)


@whole_data_set
@pytest.mark.parametrize("split", ["test", "train"])
def test_slice_is_the_documented_part_of_the_data_set(split: str) -> None:
    whole = read_images(DATA_FOLDER, split)
    indices = slice_indices(whole.labels)
    with np.load(FILES / SLICE_NAME, allow_pickle=False) as arrays:
        assert arrays[f"{split}_indices"].tolist() == indices.tolist()
    images, labels = demo.load_images(split)
    assert torch.equal(whole.take(indices).pixels, images)
    assert torch.equal(whole.take(indices).labels, labels)


@pytest.mark.parametrize(
    ("name", "slice_bar", "test_bar"), [("fashion-cnn", 0.92, 0.925), ("fashion-mlp", 0.885, 0.89)]
)
def test_accuracy_is_the_documented_one(name: str, slice_bar: float, test_bar: float) -> None:
    entry = read_metadata()["networks"][name]
    images = Images(*demo.load_images("test"))
    correct = count_correct(demo.load_network(name), images)
    assert entry["slice"] == {
        "correct": correct,
        "images": len(images),
        "accuracy": correct / len(images),
    }
    assert demo.NETWORKS[name].slice_accuracy == correct / len(images) >= slice_bar
    assert entry["test"]["images"] == 10_000
    assert demo.NETWORKS[name].test_accuracy == entry["test"]["correct"] / 10_000 >= test_bar
    assert entry["training"]["images"] == 60_000


@pytest.mark.parametrize(
    ("name", "expected"), [("fashion-cnn", CNN_PARAMETERS), ("fashion-mlp", MLP_PARAMETERS)]
)
def test_parameter_count(name: str, expected: int) -> None:
    network = demo.load_network(name)
    assert sum(p.numel() for p in network.parameters()) == expected
    assert read_metadata()["networks"][name]["parameters"] == expected
    assert {p.dtype for p in network.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", list(demo.NETWORKS))
def test_unloaded_network_has_the_same_keys_and_other_weights(name: str) -> None:
    loaded, fresh = demo.load_network(name), demo.load_network(name, weights=False)
    assert not loaded.training
    assert not fresh.training
    assert list(loaded.state_dict()) == list(fresh.state_dict())
    assert not torch.equal(next(loaded.parameters()), next(fresh.parameters()))
    assert demo.NETWORKS[name].input_shape == (1, 28, 28)


def test_layers_have_readable_names() -> None:
    cnn = {name.removesuffix(".weight") for name in demo.load_network("fashion-cnn").state_dict()}
    assert {f"features.conv{i}" for i in range(1, 7)} | {"classifier.fc1", "classifier.fc2"} <= cnn
    mlp = {name.removesuffix(".weight") for name in demo.load_network("fashion-mlp").state_dict()}
    assert {"fc1", "fc2", "fc3"} <= mlp


@pytest.mark.parametrize(("name", "first"), [("fashion-cnn", "features.conv1"), ("fashion-mlp", "fc1")])
def test_network_normalises_its_input(name: str, first: str) -> None:
    network = demo.load_network(name)
    images = demo.load_images("test")[0][:8].float() / 255
    seen: list[torch.Tensor] = []
    network.get_submodule(first).register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    network(images)
    torch.testing.assert_close(seen[0].flatten(), ((images - PIXEL_MEAN) / PIXEL_STD).flatten())


@whole_data_set
def test_normalisation_constants_are_those_of_the_training_set() -> None:
    pixels = read_images(DATA_FOLDER, "train").pixels.double() / 255
    assert pixels.mean().item() == pytest.approx(PIXEL_MEAN, abs=1e-4)
    assert pixels.std().item() == pytest.approx(PIXEL_STD, abs=1e-4)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'fashion-vit'.*fashion-cnn, fashion-mlp"):
        demo.load_network("fashion-vit")
    with pytest.raises(ValueError, match=r"'valid'.*test, train"):
        demo.load_images("valid")


def test_exchanged_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / SLICE_NAME).write_bytes(b"something else")
    with pytest.raises(DemoError, match="SHA-256"):
        read_checked(SLICE_NAME, read_metadata()["data"]["sha256"], tmp_path)
    with pytest.raises(DemoError, match=r"demo\.json"):
        read_metadata(tmp_path)


def test_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(handle: int) -> None:
        raise OSError("no space left on device")

    path = tmp_path / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr("psm_core.files.os.fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_augmentation_shifts_and_flips() -> None:
    pixels = torch.zeros(400, 1, 28, 28, dtype=torch.uint8)
    pixels[:, :, 10, 5] = 255
    plain = augment(pixels, False, torch.Generator().manual_seed(0))
    assert {tuple(p) for p in plain.nonzero()[:, 2:].tolist()} == {(10, 5), (10, 22)}
    shifted = augment(pixels, True, torch.Generator().manual_seed(0))
    expected = {(row, column) for row in range(8, 13) for column in (*range(3, 8), *range(20, 25))}
    assert {tuple(p) for p in shifted.nonzero()[:, 2:].tolist()} == expected


def test_command_trains_and_writes_the_same_files_again(
    small_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = []
    for folder in ("first", "second"):
        out = tmp_path / folder
        options = ["--network", "fashion-mlp", "--epochs", "2", "--seed", "3"]
        assert main(["--data", str(small_data), "--out", str(out), *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [
            line.startswith(f"fashion-mlp: epoch {i}/2, train loss") for i, line in enumerate(lines[:2], 1)
        ]
        assert sum("test accuracy" in line for line in lines) == 1
        metadata = read_metadata(out)
        weights.append(
            read_checked("fashion-mlp.safetensors", metadata["networks"]["fashion-mlp"]["sha256"], out)
        )
    assert weights[0] == weights[1]
    assert (tmp_path / "first" / SLICE_NAME).read_bytes() == (tmp_path / "second" / SLICE_NAME).read_bytes()

    entry = read_metadata(tmp_path / "first")["networks"]["fashion-mlp"]
    network = demo.load_network("fashion-mlp", weights=False)
    network.load_state_dict(safetensors.torch.load(weights[0]))
    assert entry["slice"]["correct"] == count_correct(network, Images(*demo.load_images("test")))
    assert entry["slice"]["accuracy"] > 0.5, "two epochs on 2,000 images learn more than chance"
    assert (entry["training"]["epochs"], entry["training"]["seed"]) == (2, 3)


def test_command_keeps_the_other_network(small_data: Path, tmp_path: Path) -> None:
    folders = ["--data", str(small_data), "--out", str(tmp_path)]
    common = [*folders, "--network", "fashion-mlp", "--epochs", "1"]
    assert main(common) == 0
    path = tmp_path / "demo.json"
    metadata = json.loads(path.read_text())
    metadata["networks"]["another"] = {"file": "another.safetensors"}
    path.write_text(json.dumps(metadata))
    assert main(common) == 0
    assert set(read_metadata(tmp_path)["networks"]) == {"another", "fashion-mlp"}


def test_missing_data_exits_2_with_one_line(tmp_path: Path) -> None:
    folders = ["--data", str(tmp_path), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "psm_core.demo", *folders]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FILES.parents[2], check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "t10k-images-idx3-ubyte.gz" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["truncated", "not gzip", "wrong size", "not IDX", "labels"])
def test_damaged_data_exits_2_with_one_line(
    damage: str, small_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_data / "train-images-idx3-ubyte.gz"
    content = path.read_bytes()
    buffer = io.BytesIO(gzip.decompress(content))
    if damage == "truncated":
        path.write_bytes(content[:-100])
    elif damage == "not gzip":
        path.write_bytes(b"<html>not found</html>")
    elif damage == "wrong size":
        path.write_bytes(gzip.compress(buffer.getvalue()[:-1]))
    elif damage == "not IDX":
        path.write_bytes(gzip.compress(b"\x01" + buffer.getvalue()[1:]))
    else:
        write_idx(small_data, "train-labels-idx1-ubyte", torch.full((2000,), 10, dtype=torch.uint8))
    assert main(["--data", str(small_data), "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert str(small_data) in captured.err


def test_missing_folder_and_bad_option_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    for option, value in (("--epochs", "0"), ("--threads", "two"), ("--seed", "-1")):
        with pytest.raises(SystemExit) as stop:
            main([option, value])
        assert stop.value.code == 2
