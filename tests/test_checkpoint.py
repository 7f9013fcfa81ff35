"""Checkpoints: what is written comes back, alone and in a fresh process; what is damaged is refused."""

from __future__ import annotations

import copy
import json
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import psm_core as psm
from psm_core import checkpoint
from psm_core.checkpoint import read_manifest, reload_checkpoint
from psm_core.errors import CheckpointError, ModelError
from psm_core.factorization import Factorization
from psm_core.network.compress import compressed_layers
from psm_core.network.models import card_of, set_card

PLANS: dict[str, dict[str, Any]] = {
    "psm": {
        "conv2": psm.PSM(K=3, iterations=5),
        "fc1": psm.PSM(K=2, Q=3, algorithm="palm4msa", iterations=3),
    },
    "svd": {"conv1": psm.SVD(rank=2), "fc1": psm.SVD(rank=3), "fc2": psm.SVD(rank=2)},
    "tucker": {"conv2": psm.Tucker(rank_out=5, rank_in=3), "fc1": psm.Tucker(rank_out=4, rank_in=4)},
    "tt": {"conv2": psm.TensorTrain(rank=3), "fc1": psm.TensorTrain(rank=4, order=2)},
    "prune": {"conv2": psm.Prune(fraction=0.1), "fc1": psm.Prune(fraction=0.05)},
    "mixed": {
        "conv1": psm.SVD(rank=1),
        "conv2": psm.Tucker(rank_out=4, rank_in=2),
        "fc1": psm.PSM(K=2, iterations=5),
        "fc2": psm.Prune(fraction=0.5),
    },
    "dense": {},
}


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def network(networks_module: str) -> nn.Module:
    return psm.load_model(f"{networks_module}:cnn")


@pytest.fixture
def written(network: nn.Module, tmp_path: Path) -> Path:
    """A sound checkpoint file with kept outputs."""
    set_card(network, input_shape=(1, 8, 8))
    return psm.save_checkpoint(psm.compress(network, PLANS["mixed"]), tmp_path / "sound.safetensors")


def parts(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The manifest and tensors of a file, read without the library."""
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    return json.loads(header["__metadata__"]["psm_core"]), safetensors.torch.load(content)


def write(file: Path, manifest: Any, tensors: dict[str, torch.Tensor], seal: bool = True) -> None:
    """Write a file, with a checksum that holds where `seal` is set."""
    if seal:
        manifest = {name: value for name, value in manifest.items() if name != "sha256"}
        manifest["sha256"] = checkpoint._digest(tensors, manifest)
    safetensors.torch.save_file(tensors, file, metadata={"psm_core": json.dumps(manifest)})


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("training", [False, True])
def test_what_is_written_comes_back(
    plan: str, training: bool, network: nn.Module, images: torch.Tensor, tmp_path: Path
) -> None:
    small = psm.compress(network, PLANS[plan]).train(training)
    file = psm.save_checkpoint(small, tmp_path / "out")
    assert file == tmp_path / "out" / "model.safetensors"
    assert small.training == training
    for path in (file, file.parent, str(file.parent)):
        back = psm.load_checkpoint(path)
        assert torch.equal(back(images), small.eval()(images))
    assert not back.training
    assert set(compressed_layers(back)) == set(PLANS[plan])
    for name, layer in compressed_layers(back).items():
        assert layer.method == PLANS[plan][name]
        assert layer.history == compressed_layers(small)[name].history
    assert card_of(back).base_hash == card_of(small).base_hash
    assert torch.equal(psm.load_model(str(file))(images), back(images))
    assert list(tmp_path.rglob("*")) == [file.parent, file]  # nothing half-written


@pytest.mark.parametrize("plan", PLANS)
def test_the_file_is_as_small_as_what_it_holds(plan: str, network: nn.Module, tmp_path: Path) -> None:
    fits = {n: m.fit(network.get_submodule(n).weight) for n, m in PLANS[plan].items()}
    file = psm.save_checkpoint(psm.compress(network, fits), tmp_path)
    rest = sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in network.state_dict().items()
        if name not in {f"{layer}.weight" for layer in fits}
    )
    expected = sum(f.nbytes for f in fits.values()) + rest
    (header,) = struct.unpack("<Q", file.read_bytes()[:8])
    assert file.stat().st_size == expected + 8 + header
    assert header < 6000
    dense = psm.save_checkpoint(network, tmp_path / "dense")
    assert plan == "dense" or file.stat().st_size < dense.stat().st_size


def test_trained_factors_are_what_is_kept(network: nn.Module, images: torch.Tensor, tmp_path: Path) -> None:
    small = psm.compress(network, PLANS["mixed"]).train()
    optimizer = torch.optim.SGD(small.parameters(), lr=0.05)
    before = small.eval()(images)
    small.train()(images).square().mean().backward()
    optimizer.step()
    back = psm.load_checkpoint(psm.save_checkpoint(small, tmp_path))
    assert torch.equal(back(images), small.eval()(images))
    assert not torch.allclose(back(images), before)


def test_tied_tensors_are_stored_once(networks_module: str, tmp_path: Path) -> None:
    model = psm.load_model(f"{networks_module}:tied")
    small = psm.compress(model, {"body": psm.SVD(rank=2)})
    file = psm.save_checkpoint(small, tmp_path)
    manifest, tensors = parts(file)
    assert manifest["aliases"] == {"head.weight": "embed.weight"}
    assert sum(tensor.numel() for tensor in tensors.values()) == 20 * 8 + 2 * (8 + 8) + 8
    back = psm.load_checkpoint(file)
    assert back.head.weight is back.embed.weight
    tokens = torch.arange(12).reshape(3, 4)
    assert torch.equal(back(tokens), small(tokens))


def test_low_precision_networks_stay_so(networks_module: str, tmp_path: Path, images: torch.Tensor) -> None:
    model = psm.load_model(f"{networks_module}:bfloat")
    small = psm.compress(model, {"1": psm.SVD(rank=4), "3": psm.Prune(fraction=0.2)})
    for saved in (small, copy.deepcopy(small).half()):
        back = psm.load_checkpoint(psm.save_checkpoint(saved, tmp_path))
        (dtype,) = {p.dtype for p in saved.parameters()}
        assert {p.dtype for p in back.parameters()} == {dtype}
        assert torch.equal(back(images.to(dtype)), saved(images.to(dtype)))


def test_a_lone_layer_and_an_architecture_given_by_hand(tmp_path: Path, images: torch.Tensor) -> None:
    torch.manual_seed(3)
    layer = nn.Linear(8, 6)
    small = psm.compress(layer, {"": psm.SVD(rank=2)})
    file = psm.save_checkpoint(small, tmp_path)
    with pytest.raises(CheckpointError, match="architecture="):
        psm.load_checkpoint(file)
    blank = nn.Linear(8, 6)
    before = copy.deepcopy(blank.state_dict())
    back = psm.load_checkpoint(file, architecture=blank)
    x = torch.randn(4, 8)
    assert torch.equal(back(x), small(x))
    assert all(torch.equal(blank.state_dict()[n], t) for n, t in before.items())  # the input is untouched
    with pytest.raises(CheckpointError, match="does not fit"):
        psm.load_checkpoint(file, architecture=nn.Linear(8, 7))
    net = nn.Sequential(nn.Linear(8, 6))
    for wrong in (net, nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Linear(8, 6, bias=False)):
        state = copy.deepcopy(wrong.state_dict())
        with pytest.raises(CheckpointError, match=r"does not fit|not expected"):
            psm.load_checkpoint(file, architecture=wrong)
        assert wrong.state_dict().keys() == state.keys()


def test_another_architecture_is_refused(written: Path, networks_module: str) -> None:
    for source in (f"{networks_module}:mlp", f"{networks_module}:tied", "torchvision:squeezenet1_1"):
        with pytest.raises(CheckpointError, match="does not fit"):
            psm.load_checkpoint(written, source)
    for source in ("demo:nothing", "nowhere:nothing", f"{networks_module}:absent", "nothing"):
        with pytest.raises(CheckpointError):
            psm.load_checkpoint(written, source)


def test_truncated_files_are_refused(written: Path, tmp_path: Path) -> None:
    content, random_places = written.read_bytes(), random.Random(7)
    places = [0, 1, 7, 8, 9, len(content) - 1, *random_places.sample(range(10, len(content) - 1), 20)]
    target = tmp_path / "cut.safetensors"
    for place in places:
        target.write_bytes(content[:place])
        with pytest.raises(CheckpointError):
            psm.load_checkpoint(target)
    target.write_bytes(content + b"\0")
    with pytest.raises(CheckpointError):
        psm.load_checkpoint(target)


def test_flipped_bits_are_noticed(written: Path, tmp_path: Path) -> None:
    """In the tensors, in the manifest, and in the header around it."""
    content = bytearray(written.read_bytes())
    (size,) = struct.unpack("<Q", content[:8])
    places = random.Random(11)
    target = tmp_path / "flipped.safetensors"
    for place in [*places.sample(range(8 + size), 60), *places.sample(range(8 + size, len(content)), 30)]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << places.randrange(7)
        target.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            psm.load_checkpoint(target)


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "newer schema": lambda m: m.update(schema=2),
    "no schema": lambda m: m.pop("schema"),
    "schema of another type": lambda m: m.update(schema=[1]),
    "no source": lambda m: m.pop("source"),
    "source of another type": lambda m: m.update(source=5),
    "source of another kind": lambda m: m.update(source="os:getcwd"),
    "unknown demonstration": lambda m: m.update(source="demo:nothing"),
    "no layers": lambda m: m.pop("layers"),
    "layers as a list": lambda m: m.update(layers=[]),
    "a layer less": lambda m: m["layers"].pop("fc1"),
    "an unknown layer": lambda m: m["layers"].update(other=m["layers"]["fc1"]),
    "a layer as text": lambda m: m["layers"].update(fc1="svd"),
    "an unknown method": lambda m: m["layers"]["fc1"].update(method="magic"),
    "a method of another type": lambda m: m["layers"]["fc1"].update(method=["svd"]),
    "an unknown kind": lambda m: m["layers"]["fc1"].update(kind="magic"),
    "a kind of another type": lambda m: m["layers"]["fc1"].update(kind=[]),
    "another kind": lambda m: m["layers"]["fc1"].update(kind="tensor-train"),
    "no params": lambda m: m["layers"]["fc1"].update(params={}),
    "params out of range": lambda m: m["layers"]["fc1"]["params"].update(K=-1),
    "params beyond floats": lambda m: m["layers"]["fc1"]["params"].update(K=10**400),
    "a shape too large": lambda m: m["layers"]["fc1"].update(shape=[24, 193]),
    "a shape transposed": lambda m: m["layers"]["fc1"].update(shape=[192, 24]),
    "a shape of text": lambda m: m["layers"]["fc1"].update(shape="24x192"),
    "an infinite shape": lambda m: m["layers"]["fc1"].update(shape=[24, float("inf")]),
    "a factor less": lambda m: m["layers"]["fc1"]["factors"].pop(),
    "no factors": lambda m: m["layers"]["fc1"].update(factors=[]),
    "a huge factor": lambda m: m["layers"]["fc1"]["factors"][0].update(shape=[10**12, 10**12]),
    "a negative factor": lambda m: m["layers"]["fc1"]["factors"][0].update(shape=[-24, 5]),
    "a factor dense": lambda m: m["layers"]["fc2"]["factors"][0].update(sparse=False),
    "history of text": lambda m: m["layers"]["fc1"].update(history="abc"),
    "no types": lambda m: m.update(dtypes={}),
    "a type that is a function": lambda m: m["dtypes"].update(fc1="load"),
    "a type that is unknown": lambda m: m["dtypes"].update(fc1="float33"),
    "an alias of nothing": lambda m: m.update(aliases={"fc1.bias": "nothing"}),
    "no hash": lambda m: m.pop("base_hash"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_manifests_are_refused_with_and_without_a_new_checksum(edit: str, written: Path) -> None:
    manifest, tensors = parts(written)
    EDITS[edit](manifest)
    for seal in (False, True):
        write(written, manifest, tensors, seal)
        with pytest.raises(CheckpointError) as error:
            psm.load_checkpoint(written)
        assert len(str(error.value).splitlines()) == 1
        assert "psm_core" in str(error.value) or str(written) in str(error.value)


@pytest.mark.parametrize("text", ["null", "[]", "{}", "7", "not json", "", '{"schema": 1}', "[" * 100_000])
def test_manifests_that_are_none(text: str, written: Path) -> None:
    _, tensors = parts(written)
    safetensors.torch.save_file(tensors, written, metadata={"psm_core": text})
    with pytest.raises(CheckpointError, match="manifest"):
        psm.load_checkpoint(written)


def test_a_tensor_less_or_more_is_refused(written: Path) -> None:
    manifest, tensors = parts(written)
    for name in tensors:
        # The kept outputs are not needed to load, and PyTorch sets a missing batch count itself.
        if name not in ("probe", "state:norm.num_batches_tracked"):
            write(written, manifest, {n: t for n, t in tensors.items() if n != name})
            with pytest.raises(CheckpointError):
                psm.load_checkpoint(written)
    for name in ("state:other", "state:fc1.weight", "state:fc1.factor_0"):
        write(written, manifest, tensors | {name: torch.zeros(3)})
        with pytest.raises(CheckpointError):
            psm.load_checkpoint(written)


class Harmful:
    """Unpickled, it leaves a file behind."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_other_files_are_refused_and_nothing_in_them_runs(network: nn.Module, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    files = {name: tmp_path / name for name in ("a.pt", "b.pt", "c.safetensors", "d.safetensors", "e.bin")}
    files["a.pt"].write_bytes(pickle.dumps(Harmful(trap)))
    torch.save(Harmful(trap), files["b.pt"])
    pickle.loads(files["a.pt"].read_bytes())
    assert trap.exists()  # the trap works
    trap.unlink()
    safetensors.torch.save_file(dict(network.state_dict()), files["c.safetensors"])
    safetensors.torch.save_file({}, files["d.safetensors"])
    files["e.bin"].write_bytes(b"")
    (tmp_path / "folder").mkdir()
    missing = [tmp_path / "folder", tmp_path / "none.safetensors", Path("a" * 300), Path("")]
    for path in [*files.values(), *missing]:
        for load in (psm.load_checkpoint, read_manifest, reload_checkpoint):
            with pytest.raises(CheckpointError):
                load(path)
    with pytest.raises(CheckpointError, match="no psm_core manifest"):
        psm.load_checkpoint(files["c.safetensors"])
    for file in files.values():
        with pytest.raises(CheckpointError):
            psm.load_model(str(file))
    assert not trap.exists()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("os:system", "standard library"),
        ("os.path:exists", "standard library"),
        ("builtins:dict", "standard library"),
        ("subprocess:Popen", "standard library"),
        ("tempfile:mkdtemp", "standard library"),
        ("psm_core.files:tempfile.mkdtemp", "tempfile.mkdtemp; expected a network"),
        ("psm_core.files:os.getcwd", "neither a function nor"),
        ("psm_core.files:os.abort", "neither a function nor"),
        ("psm_core.sparse:SparseMatrix", "neither a function nor"),
        ("small_networks:not_callable", "neither a function nor"),
        ("small_networks:absent", "cannot be imported"),
        ("small_networks:CNN.absent", "cannot be imported"),
        ("no_such_package.networks:cnn", "cannot be imported"),
        (".small_networks:cnn", "cannot be imported"),
        ("..:cnn", "cannot be imported"),
        ("small networks:cnn", "cannot be imported"),
        ("ends_early:network", "cannot be imported.*SystemExit"),
        ("cannot_parse:network", "cannot be imported.*SyntaxError"),
        ("small_networks:broken", "ZeroDivisionError: no network today"),
        ("small_networks:no_network", "returned int"),
        ("small_networks:parameterless", "no parameters"),
        ("torch.nn:ReLU", "no parameters"),
        ("torch.nn:Linear", "failed: TypeError"),
        ("small_networks:", "neither an existing file nor"),
        (":cnn", "neither an existing file nor"),
        ("a" * 300, "neither an existing file nor"),
        ("a\0b:c", "cannot be imported"),
    ],
)
def test_sources_that_are_no_networks(
    source: str, expected: str, networks_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_early.py").write_text("raise SystemExit(0)")
    (tmp_path / "cannot_parse.py").write_text("def network(:")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match=expected):
        psm.load_model(source)


def test_functions_and_classes_of_a_package_are_networks(networks_module: str) -> None:
    for source in (f"{networks_module}:cnn", f"{networks_module}:CNN"):
        model = psm.load_model(source)
        assert card_of(model).source == source
        assert not model.training


def test_verification_runs_elsewhere_and_compares_outputs(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of this process is used: a poisoned library here does not matter there."""

    def poisoned(*args: object, **kwargs: object) -> None:
        raise AssertionError("called in the process under test")

    expected = reload_checkpoint(written)
    assert expected.difference == 0.0
    for name in ("load_checkpoint", "reload_checkpoint", "_outputs", "_load_state"):
        monkeypatch.setattr(checkpoint, name, poisoned)
    monkeypatch.setattr(Factorization, "from_tensors", poisoned)
    result = psm.verify_checkpoint(written)
    assert result.ok
    assert result.difference is not None
    assert result.difference < 1e-6
    assert (result.layers, result.nbytes) == (4, written.stat().st_size)
    assert result.parameters == expected.parameters
    assert result.inputs == "one random input"


def test_verification_fails_when_outputs_differ(written: Path) -> None:
    """Other weights under a checksum that holds: only running the network can tell."""
    manifest, tensors = parts(written)
    write(written, manifest, tensors | {"state:fc1.bias": tensors["state:fc1.bias"] + 0.5})
    assert psm.load_checkpoint(written) is not None
    assert not reload_checkpoint(written).ok
    with pytest.raises(CheckpointError, match="outputs differ"):
        psm.verify_checkpoint(written)
