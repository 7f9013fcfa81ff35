"""Plans: which layer is compressed by which method; uniform ones for a budget, and recipe files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from psm_core.errors import BudgetError, ModelError, ParameterError, PsmError
from psm_core.files import write_atomically
from psm_core.methods import get_method, method_from_json
from psm_core.methods.base import Method, Shape, floats_in_budget
from psm_core.network.compress import stored_parameters
from psm_core.network.layers import compressible_layers

SMALL_SHARE = 0.5
RECIPE_SCHEMA = 1


@dataclass(frozen=True)
class Plan:
    """Methods by layer name; `kept` are the compressible layers left dense, with the reason.

    `stored` is an upper bound of the floats the whole network then stores, of `total` before.
    """

    layers: dict[str, Method]
    kept: dict[str, str]
    stored: int
    total: int


def uniform_plan(model: nn.Module, method: str, fraction: float, **fixed: Any) -> Plan:
    """One method for the whole network, within `fraction` of all its parameters.

    Biases, normalisations and other layers that cannot be compressed stay dense and count on both
    sides. So do the smallest layers, as long as together they take at most half of what is left:
    a first convolution or a classifier costs few floats and much accuracy. All other layers get
    the same share of their weights, the largest that meets the budget (or, where the method cannot
    go as low, its smallest setting).

    Raises:
        BudgetError: the budget is below what must be stored.
        ModelError: the model has no layer that can be compressed.
        ParameterError: the fraction is not in (0, 1], or a fixed parameter is wrong.
    """
    weights = {n: tuple(m.weight.shape) for n, m in compressible_layers(model).items()}
    if not weights:
        raise ModelError("no layer of this model can be compressed; see `layers` for the reasons")
    kind = get_method(method)
    fixed = kind.check_fixed(fixed)
    sizes = {name: math.prod(shape) for name, shape in weights.items()}
    least = {name: kind.smallest(shape, **fixed).storage(shape) for name, shape in weights.items()}
    total = stored_parameters(model)
    fixed_floats = total - sum(sizes.values())
    budget = floats_in_budget((total,), fraction) - fixed_floats
    kept = {n: f"{method} cannot store it in fewer floats" for n in sizes if least[n] >= sizes[n]}

    def needed(dense: Iterable[str]) -> int:
        """Floats of the compressible layers when these stay dense and the others are at their least."""
        return sum(sizes[n] if n in dense else least[n] for n in sizes)

    if needed(kept) > budget:
        reachable = (needed(kept) + fixed_floats) / total
        raise BudgetError(
            f"{method} cannot store this network in {fraction:.4g} of its {total:,} parameters; raise "
            f"the budget to at least {math.ceil(reachable * 1e4) / 1e4:g}, or choose psm or prune",
            reachable,
        )
    for name in sorted(sizes.keys() - kept.keys(), key=lambda n: (sizes[n], n)):
        dense = sum(sizes[n] for n in kept) + sizes[name]
        if dense > SMALL_SHARE * budget or needed({*kept, name}) > budget:
            break
        kept[name] = f"small: {sizes[name]:,} weights are left dense within this budget"
    room = budget - sum(sizes[name] for name in kept)
    shapes = {name: shape for name, shape in weights.items() if name not in kept}

    low, high = 0.0, 1.0
    best = _settings(method, shapes, low, fixed)
    for _ in range(24):
        middle = (low + high) / 2
        settings = _settings(method, shapes, middle, fixed)
        if _stored(settings, shapes) <= room:
            low, best = middle, settings
        else:
            high = middle
    stored = fixed_floats + sum(sizes[n] for n in kept) + _stored(best, shapes)
    return Plan(best, kept, stored, total)


def _settings(
    method: str, shapes: Mapping[str, Shape], fraction: float, fixed: Mapping[str, Any]
) -> dict[str, Method]:
    """Each layer's setting at the same fraction, or the method's smallest where it cannot."""
    kind = get_method(method)
    settings: dict[str, Method] = {}
    for name, shape in shapes.items():
        try:
            if fraction * math.prod(shape) < 1:
                raise BudgetError("", 0.0)
            settings[name] = kind.at_budget(shape, fraction, **fixed)
        except BudgetError:
            settings[name] = kind.smallest(shape, **fixed)
    return settings


def _stored(settings: Mapping[str, Method], shapes: Mapping[str, Shape]) -> int:
    return sum(setting.storage(shapes[name]) for name, setting in settings.items())


def write_recipe(path: str | Path, layers: Mapping[str, Method], model: str, calibration: str = "") -> None:
    """Write a recipe: a small JSON file of methods by layer, to edit, share and rerun.

    `calibration` names the data they are fitted to, "" for the weights alone.
    """
    document = {
        "recipe": RECIPE_SCHEMA,
        "model": model,
        **({"calibration": calibration} if calibration else {}),
        "layers": {name: {"method": m.name, "params": m.params} for name, m in layers.items()},
    }
    write_atomically(Path(path), (json.dumps(document, indent=2) + "\n").encode())


def read_recipe(path: str | Path) -> dict[str, Method]:
    """The methods by layer of a recipe file.

    Raises:
        ParameterError: the file is missing, is no recipe, or a setting is wrong; names the layer.
    """
    methods = {}
    for name, setting in _recipe(path)["layers"].items():
        try:
            methods[name] = method_from_json(setting)
        except PsmError as error:
            raise ParameterError(f"recipe '{path}', layer '{name}': {error}") from None
    return methods


def recipe_calibration(path: str | Path) -> str:
    """The data that a recipe file has its methods fitted to, "" for the weights alone.

    Raises:
        ParameterError: the file is missing or is no recipe.
    """
    calibration = _recipe(path).get("calibration", "")
    if not isinstance(calibration, str):
        raise ParameterError(f"recipe '{path}' has calibration {calibration!r}; expected the name of data")
    return calibration


def _recipe(path: str | Path) -> dict[str, Any]:
    """The JSON of a recipe file, with its layers."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ParameterError(
            f"recipe '{path}' cannot be read ({error.strerror}); expected a JSON file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"recipe '{path}' is not JSON: {error}") from None
    layers = document.get("layers") if isinstance(document, dict) else None
    if not isinstance(layers, dict) or not layers:
        raise ParameterError(
            f'recipe \'{path}\' has no layers; expected {{"layers": {{"name": {{"method": …, '
            '"params": {…}}}}'
        )
    if document.get("recipe", RECIPE_SCHEMA) != RECIPE_SCHEMA:
        raise ParameterError(f"recipe '{path}' has schema {document['recipe']}, not {RECIPE_SCHEMA}")
    return {**document, "layers": layers}
