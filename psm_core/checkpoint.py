"""Compressed checkpoints: one safetensors file with factors in place of weights, and a manifest.

The manifest is JSON in the file's own header. Reading a checkpoint executes nothing from it: it
names an architecture that is built by the same rules as `load_model`.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from psm_core.errors import CheckpointError, PsmError, first_line
from psm_core.experiments.evaluation import default_data
from psm_core.experiments.record import library_versions
from psm_core.factorization import Factorization
from psm_core.files import remove_abandoned, write_atomically
from psm_core.methods import method_from_json
from psm_core.network.compress import compressed_layers, replace_layer, stored_parameters
from psm_core.network.layers import get_layer
from psm_core.network.models import build_model, card_of, evaluating, set_card, tensors_hash

SCHEMA = 1
MANIFEST = {"source": str, "base_hash": str, "layers": dict, "dtypes": dict, "aliases": dict, "probe": dict}
FILE_NAME = "model.safetensors"
PROBE_INPUTS = 8
PROBE_VALUES = 4096
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Verification:
    """What a reload showed: the largest output difference on `inputs`, and the file's size.

    `difference` is the largest |y − y′| over the outputs kept when the file was written, divided by
    their largest magnitude; None where there were none, and `inputs` says why.
    """

    path: str
    source: str
    layers: int
    nbytes: int
    parameters: int
    difference: float | None
    inputs: str

    @property
    def ok(self) -> bool:
        """Whether the reloaded network computes the same outputs."""
        return self.difference is None or self.difference <= TOLERANCE


def save_checkpoint(model: nn.Module, path: str | Path) -> Path:
    """Write a (compressed) network to one file; a path without suffix is a folder for it.

    Every tensor is stored once: factors of compressed layers, everything else as it is. A few
    outputs on real inputs are kept with it, so that a reload can be verified.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: the path cannot be written.
    """
    target = Path(path)
    if os.path.isdir(target) or not target.suffix:
        target = target / FILE_NAME
    tensors, manifest = _contents(model)
    manifest["probe"], outputs = _probe(model)
    if outputs is not None:
        tensors["probe"] = outputs
    manifest["sha256"] = _digest(tensors, manifest)
    content = save(tensors, metadata={"psm_core": json.dumps(manifest)})
    try:
        write_atomically(target, content)
    except OSError as error:
        raise CheckpointError(f"'{target}' cannot be written: {error.strerror}") from error
    return target


def save_verified(model: nn.Module, folder: str | Path) -> Verification:
    """Write a network to `folder`, once a fresh process has reloaded it; what was there stays till then.

    Raises:
        CheckpointError: it cannot be written, does not reload, or computes something else.
    """
    target = Path(folder) / FILE_NAME
    unverified = target.with_name(f".{os.getpid()}-unverified.part")
    remove_abandoned(target.parent.glob(".*.part"))
    try:
        result = verify_checkpoint(save_checkpoint(model, unverified))
        os.replace(unverified, target)
    finally:
        unverified.unlink(missing_ok=True)
    return replace(result, path=str(folder))


def load_model(source: str) -> nn.Module:
    """A network in evaluation mode on the CPU, with its card.

    Sources: `demo:NAME` (shipped, trained), `torchvision:NAME`, `timm:NAME`, `hf:NAME` (pretrained
    weights where they can be had, else random ones, and the card's notice says so),
    `package.module:callable` (called without arguments), or the path of a compressed checkpoint.

    Raises:
        UnknownNameError: no such model.
        ModelError: the string is of no known form, or the model cannot be built.
        CheckpointError: the path is not a sound checkpoint.
    """
    return load_checkpoint(source) if os.path.exists(source) else build_model(source, weights=True)


def load_checkpoint(path: str | Path, architecture: nn.Module | str = "") -> nn.Module:
    """The network of a checkpoint file, or of the folder that holds it.

    `architecture` (a module, which is copied, or a source string) is needed only where the file
    does not name one.

    Raises:
        CheckpointError: missing, truncated, altered, of a newer schema, or not fitting.
    """
    manifest, tensors = _read(Path(path))
    if isinstance(architecture, nn.Module):
        model = copy.deepcopy(architecture)
    else:
        model = _build(architecture or manifest["source"], path, str(manifest.get("class", "")))
    try:
        for name, layout in manifest["layers"].items():
            parts = _below(tensors, f"factors:{name}:")
            factorization = Factorization.from_tensors(method_from_json(layout), layout, parts)
            layer = get_layer(model, name)
            layer.to(dtype=getattr(torch, manifest["dtypes"][name]))
            model = replace_layer(model, name, factorization.to_module(layer))
        state = _below(tensors, "state:")
        state |= {alias: state[name] for alias, name in manifest["aliases"].items()}
        _load_state(model, state)
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in state and tensor.dtype != state[name].dtype:
                tensor.data = state[name].clone()
    except CheckpointError as error:
        raise CheckpointError(f"'{path}' is damaged: {error}") from error
    except (PsmError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"'{path}' does not fit its architecture: {first_line(error)}") from error
    return set_card(model, base_hash=manifest["base_hash"], path=str(path)).eval()


def verify_checkpoint(path: str | Path, architecture: str = "") -> Verification:
    """Reload a checkpoint in a fresh Python process and compare its outputs with those kept in it.

    Raises:
        CheckpointError: it does not reload, or computes something else.
    """
    read_manifest(path)  # what is missing or damaged needs no other process to be noticed
    done = subprocess.run(
        [sys.executable, "-m", "psm_core.reload", str(path), architecture],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise CheckpointError(lines[-1] if lines else f"'{path}' does not reload")
    result = Verification(**json.loads(done.stdout.splitlines()[-1]))
    if not result.ok:
        raise CheckpointError(
            f"'{path}' reloads, but its outputs differ by {result.difference:.2g} of their size from "
            f"those it was written with; expected at most {TOLERANCE:g}"
        )
    return result


def reload_checkpoint(path: str | Path, architecture: str = "") -> Verification:
    """Reload a checkpoint in this process and compare its outputs with those kept in it.

    Raises:
        CheckpointError: it does not reload.
    """
    manifest, tensors = _read(Path(path))
    model = load_checkpoint(path, architecture)
    probe = manifest["probe"]
    difference, inputs = None, str(probe.get("none", ""))
    if not inputs:
        difference = _difference(_outputs(model, probe).double(), tensors["probe"].double())
        inputs = f"{probe['count']} inputs from {probe['data']}" if probe["data"] else "one random input"
    return Verification(
        path=str(path),
        source=manifest["source"],
        layers=len(manifest["layers"]),
        nbytes=checkpoint_file(path).stat().st_size,
        parameters=stored_parameters(model),
        difference=difference,
        inputs=inputs,
    )


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest |found − expected| over the largest finite |expected|; equal NaN or ∞ are equal."""
    same = (found == expected) | (found.isnan() & expected.isnan())
    apart = torch.where(same, 0.0, (found - expected).abs()).nan_to_num(nan=torch.inf)
    finite = expected[expected.isfinite()].abs()
    size = float(finite.max()) if finite.numel() else 0.0
    return float(apart.max()) / (size or 1.0)


def checkpoint_file(path: str | Path) -> Path:
    """The checkpoint's file, also when its folder is named."""
    target = Path(path)
    return target / FILE_NAME if os.path.isdir(target) else target


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint, its tensors checked."""
    return _read(Path(path))[0]


def _contents(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors to store, and the manifest that explains them."""
    card = card_of(model)
    tensors: dict[str, Tensor] = {}
    layouts: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    factor_state = set()
    for name, layer in compressed_layers(model).items():
        factorization = layer.factorization()
        layouts[name] = factorization.layout()
        dtypes[name] = str(next(layer.parameters()).dtype).removeprefix("torch.")
        tensors |= {f"factors:{name}:{k}": t for k, t in factorization.tensors().items()}
        prefix = f"{name}." if name else ""
        factor_state |= {prefix + k for k in layer.state_dict() if k != "bias"}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict().items():
        if name in factor_state or not isinstance(tensor, Tensor):
            continue
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        owner = first.setdefault(place, name) if tensor.numel() else name
        if owner == name:
            tensors[f"state:{name}"] = tensor.detach().cpu().contiguous().clone()
        else:
            aliases[name] = owner
    manifest = {
        "schema": SCHEMA,
        "source": card.source,
        "class": f"{type(model).__module__}:{type(model).__qualname__}",
        "base_hash": card.base_hash,
        "layers": layouts,
        "dtypes": dtypes,
        "aliases": aliases,
        "parameters": stored_parameters(model),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": library_versions(),
    }
    return tensors, manifest


def _probe(model: nn.Module) -> tuple[dict[str, Any], Tensor | None]:
    """What is needed to repeat a few outputs, and the outputs; or why there are none."""
    card = card_of(model)
    if not card.data and not card.input_shape:
        return {"none": "no inputs are known to compare outputs"}, None
    probe = {
        "data": card.data,
        "shape": list(card.input_shape or ()),
        "count": PROBE_INPUTS if card.data else 1,
    }
    try:
        return probe, _outputs(model, probe)
    except Exception as error:  # whatever the model's own code raises
        return {"none": f"the network does not run on the inputs that are known: {first_line(error)}"}, None


def _outputs(model: nn.Module, probe: Mapping[str, Any]) -> Tensor:
    """The first values that the network computes on the probe's inputs, on the CPU as in a reload."""
    if next(model.parameters()).device.type != "cpu":
        model = copy.deepcopy(model).cpu()
    data = default_data(model, str(probe["data"]))
    count = int(probe["count"])
    if data is not None:
        inputs, _ = next(data.batches(count))
    else:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(count, *(int(n) for n in probe["shape"]), generator=generator)
    with evaluating(model), torch.inference_mode():
        output = model(inputs.to(next(model.parameters()).dtype))
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output.detach().flatten()[:PROBE_VALUES].float().cpu().clone()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The manifest and tensors of a checkpoint whose checksum holds."""
    file = checkpoint_file(path)
    if not os.path.isfile(file):
        raise CheckpointError(f"no checkpoint at '{path}'; expected a .safetensors file or its folder")
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"'{file}' is not a sound safetensors file: {first_line(error)}") from None
    if "psm_core" not in metadata:
        raise CheckpointError(f"'{file}' holds weights but no psm_core manifest; expected a checkpoint")
    try:
        manifest = json.loads(metadata["psm_core"])
        schema, digest = manifest["schema"], manifest.pop("sha256")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"the manifest of '{file}' is damaged; write it again") from None
    if schema != SCHEMA:
        raise CheckpointError(f"'{file}' has schema {schema}, this version reads {SCHEMA}; update psm_core")
    if digest != _digest(tensors, manifest):
        raise CheckpointError(f"'{file}' is damaged: its checksum does not match; write it again")
    if any(not isinstance(manifest.get(name), kind) for name, kind in MANIFEST.items()):
        raise CheckpointError(f"the manifest of '{file}' is not of the expected form; write it again")
    return manifest, tensors


def _build(source: str, path: str | Path, kind: str) -> nn.Module:
    """The architecture, with weights that are about to be replaced."""
    if not source:
        raise CheckpointError(
            f"'{path}' does not say how to build its network, a {kind}; give it one with "
            "load_checkpoint(path, architecture=…)"
        )
    try:
        return build_model(source, weights=False)
    except PsmError as error:
        raise CheckpointError(f"the architecture of '{path}' cannot be built: {error}") from error


def _load_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load everything but the factors, which are in place already."""
    missing, unexpected = model.load_state_dict(state, strict=False)
    factors = {
        (f"{name}." if name else "") + key
        for name, layer in compressed_layers(model).items()
        for key in layer.state_dict()
        if key != "bias"
    }
    missing = [name for name in missing if name not in factors]
    if missing or unexpected:
        raise CheckpointError(
            f"{len(missing)} tensors are missing ({', '.join(missing[:3])}) and {len(unexpected)} are "
            f"not expected ({', '.join(unexpected[:3])})"
        )


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _digest(tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> str:
    """SHA-256 over the manifest and the tensors."""
    return tensors_hash(tensors, json.dumps(manifest, sort_keys=True))
