"""The registry: each module of this package that defines a `Method` adds it, nothing else to touch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from psm_core.errors import ParameterError, UnknownNameError
from psm_core.methods.base import Method, Shape, check_weight_shape


def _discover() -> dict[str, type[Method]]:
    """Methods by name, PSM first."""
    found: dict[str, type[Method]] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name == "base" or module.name.startswith("_"):
            continue
        for member in vars(importlib.import_module(f"{__name__}.{module.name}")).values():
            is_method = isinstance(member, type) and issubclass(member, Method)
            if is_method and member.__module__ == f"{__name__}.{module.name}":
                found[member.name] = member
    return dict(sorted(found.items(), key=lambda item: (item[0] != "psm", item[0])))


METHODS = _discover()


def get_method(name: str) -> type[Method]:
    """The method class of this name.

    Raises:
        UnknownNameError: there is none.
    """
    if not isinstance(name, str) or name not in METHODS:
        raise UnknownNameError("method", name, METHODS)
    return METHODS[name]


def at_budget(name: str, shape: Shape, fraction: float, **fixed: Any) -> Method:
    """The setting of a method that stores at most `fraction` of the weights, as close as it can.

    Raises:
        UnknownNameError: no such method.
        WeightError: a weight of this shape cannot be factorized.
        ParameterError: the fraction is not in (0, 1], or a fixed parameter is wrong.
        BudgetError: even the method's smallest setting stores more.
    """
    kind = get_method(name)
    check_weight_shape(tuple(shape))
    return kind.at_budget(tuple(shape), fraction, **kind.check_fixed(fixed))


def method_from_json(document: Mapping[str, Any]) -> Method:
    """The method that `Method.to_json` described.

    Raises:
        UnknownNameError: no such method or parameter.
        ParameterError: a value is out of range, or the document is not of that form.
    """
    if not isinstance(document, Mapping) or not isinstance(document.get("params", {}), Mapping):
        raise ParameterError(f'expected {{"method": …, "params": {{…}}}}, got {document!r}')
    return get_method(document.get("method", "")).from_params(document.get("params", {}))
