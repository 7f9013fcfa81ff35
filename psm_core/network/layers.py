"""The layers of a network: one row each, and why a layer can or cannot be compressed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from psm_core.errors import LayerError, ModelError, UnknownNameError, first_line
from psm_core.network.models import card_of, evaluating
from psm_core.network.modules import CompressedLayer, why_not


@dataclass(frozen=True)
class LayerRow:
    """What is known of a layer before anything is fitted; read by attribute or by key.

    `parameters` counts the layer's own floats (weight and bias), `share` is their part of the
    network, `macs` the multiply-accumulates for one input (None when no input shape is known, and
    for what is not counted: all but Linear and Conv2d layers that are called), `reason` says why a
    layer is not compressible.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    parameters: int
    share: float
    macs: int | None
    compressible: bool
    reason: str

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def keys(self) -> list[str]:
        """The names of the columns, so that `dict(row)` works."""
        return [field.name for field in dataclasses.fields(self)]


def layers(model: nn.Module, example: Tensor | None = None) -> list[LayerRow]:
    """One row for each module that owns parameters, in the network's order.

    `example` is an input batch for counting MACs; without it the input shape of the model's card
    is used, and where there is none, `macs` is None.

    Raises:
        ModelError: the model has no parameters, or some of unknown shape, or cannot run the example.
    """
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise ModelError("the model has layers of unknown shape; run it once on an input first")
    total = sum(p.numel() for p in model.parameters())
    if total == 0:
        raise ModelError(f"{type(model).__name__} has no parameters; there is nothing to compress")
    macs = count_macs(model, example)
    shared = _shared_weights(model)
    rows = []
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        reason = _reason(model, name, module, shared)
        parameters = sum(p.numel() for p in own)
        rows.append(
            LayerRow(
                name=name,
                kind=type(module).__name__,
                shape=_weight_shape(module),
                parameters=parameters,
                share=parameters / total,
                macs=None if macs is None else macs.get(name),
                compressible=not reason,
                reason=reason,
            )
        )
    return rows


def compressible_layers(model: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """The layers that can be compressed, by name."""
    shared = _shared_weights(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and not _reason(model, name, module, shared)
    }


def get_layer(model: nn.Module, name: str) -> nn.Linear | nn.Conv2d:
    """The compressible layer of this name.

    Raises:
        UnknownNameError: the model has no such layer.
        LayerError: it has, but it cannot be compressed; the message says why.
    """
    modules = dict(model.named_modules())
    if name not in modules:
        raise UnknownNameError("layer", name, compressible_layers(model))
    layer = modules[name]
    if reason := _reason(model, name, layer, _shared_weights(model)):
        raise LayerError(f"layer '{name}' cannot be compressed: {reason}; choose another layer")
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    return layer


def count_macs(model: nn.Module, example: Tensor | None = None) -> dict[str, int] | None:
    """Multiply-accumulates of each Linear and Conv2d for one input, by layer name.

    A layer that runs several times in one pass counts each time. None when no example is given and
    the model's card knows no input shape.

    Raises:
        ModelError: the model cannot run the example.
    """
    if example is None:
        shape = card_of(model).input_shape
        if shape is None:
            return None
        first = next(iter(model.parameters()))
        example = torch.zeros(1, *shape, dtype=first.dtype, device=first.device)
    macs: dict[str, int] = {}
    batch = example.shape[0]

    def count(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            shape = _weight_shape(module)
            positions = output.numel() // shape[0]
            macs[name] = macs.get(name, 0) + positions * math.prod(shape) // batch

        return hook

    handles = [
        module.register_forward_hook(count(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    try:
        with evaluating(model), torch.no_grad():
            model(example)
    except Exception as error:  # whatever the model's own code raises
        raise ModelError(
            f"the model does not run on an input of shape {tuple(example.shape)}: {first_line(error)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return macs


def _weight_shape(module: nn.Module) -> tuple[int, ...]:
    """The shape of a module's weight, or of its largest parameter where nothing has that name."""
    if isinstance(module, CompressedLayer):
        return module.weight_shape
    weight = module._parameters.get("weight")
    if weight is None:
        weight = max(module.parameters(recurse=False), key=lambda p: p.numel())
    return tuple(weight.shape)


def _shared_weights(model: nn.Module) -> dict[str, str]:
    """Layer name → name of another layer with the same weight tensor."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):  # one module at two places, too
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        other = first.setdefault(id(weight), name)
        if other != name:
            shared[name], shared[other] = other, name
    return shared


def _reason(model: nn.Module, name: str, layer: nn.Module, shared: dict[str, str]) -> str:
    """Why a layer of a network cannot be compressed, or an empty string."""
    if isinstance(layer, nn.Linear | nn.Conv2d) and name in shared:
        return f"it shares its weight with '{shared[name]}'"
    for parent in _parents(model, name):
        if isinstance(parent, nn.MultiheadAttention):
            return "nn.MultiheadAttention reads this weight directly instead of calling the layer"
    return why_not(layer)


def _parents(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules around a layer, the network first."""
    module = model
    for part in name.split(".")[:-1]:
        yield module
        module = getattr(module, part)
    yield module
