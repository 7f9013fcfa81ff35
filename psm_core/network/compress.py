"""Replace layers of a network by their factorizations."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import nn

from psm_core.errors import ModelError, ParameterError, first_line
from psm_core.factorization import Factorization
from psm_core.methods.base import Method
from psm_core.network.calibration import Calibration
from psm_core.network.layers import get_layer
from psm_core.network.models import card_of, model_hash, set_card
from psm_core.network.modules import CompressedLayer
from psm_core.progress import OnLayerStep, of_layer


def compress(
    model: nn.Module,
    plan: Mapping[str, Method | Factorization],
    on_step: OnLayerStep | None = None,
    device: str = "auto",
    calibration: Mapping[str, Calibration] | None = None,
) -> nn.Module:
    """A copy of the network in which the planned layers compute with factors.

    `plan` gives, by layer name, a method (fitted here) or a factorization (used as it is). The
    input is untouched. With `calibration`, the statistics by layer that `calibrate` gave, the methods
    minimize the error of the layers' outputs. `on_step` receives the layer's name and a step; it
    cancels by raising.

    Raises:
        UnknownNameError: the plan names a layer that the model does not have.
        LayerError: it names one that cannot be compressed.
        ParameterError: a setting is out of range for its layer, or is no method, or the calibration
            leaves out its layer.
        WeightError: a weight is not finite.
        ModelError: the model cannot be copied.
    """
    for name, setting in plan.items():
        layer = get_layer(model, name)
        if not isinstance(setting, Method | Factorization):
            raise ParameterError(
                f"the plan for layer '{name}' is {setting!r}; expected a method such as "
                "psm.PSM(K=10), or a factorization"
            )
        if isinstance(setting, Method):
            setting.check_shape(tuple(layer.weight.shape))
            if calibration is not None and name not in calibration:
                raise ParameterError(
                    f"the calibration has no statistics of layer '{name}'; expected those of each layer "
                    "that is fitted: psm.calibrate(model, data, plan)"
                )
    try:
        small = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"the model cannot be copied ({first_line(error)}); make weights that are computed "
            "from others (pruning masks, weight_norm) permanent first"
        ) from error
    set_card(small, base_hash=card_of(model).base_hash or model_hash(model))
    for name, setting in plan.items():
        layer = get_layer(small, name)
        if isinstance(setting, Method):
            statistics = None if calibration is None else calibration[name]
            setting = setting.fit(layer.weight, of_layer(on_step, name), statistics, device)
        small = replace_layer(small, name, setting.to_module(layer))
    return small


def replace_layer(model: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """Put `layer` at `name`; returns the model, which is the layer itself for a lone layer."""
    if not name:
        return set_card(layer, **vars(card_of(model)))
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)
    return model


def compressed_layers(model: nn.Module) -> dict[str, CompressedLayer]:
    """The compressed layers of a network, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, CompressedLayer)}


def stored_parameters(model: nn.Module) -> int:
    """Floats that the network stores: parameters (factors instead of weights, biases) counted once."""
    return sum(p.numel() for p in model.parameters())
