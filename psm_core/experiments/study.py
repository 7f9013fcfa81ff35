"""A study: one model, its data and the store; every result is computed once and kept."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import pandas as pd
import torch
from torch import nn

from psm_core.device import choose_device
from psm_core.errors import BudgetError, FitError, WeightError
from psm_core.experiments.calibrations import Calibrations
from psm_core.experiments.evaluation import default_data, evaluate
from psm_core.experiments.keys import eval_key, fit_key
from psm_core.experiments.plan import uniform_plan
from psm_core.experiments.record import NETWORK, Record
from psm_core.experiments.store import ResultStore
from psm_core.factorization import Factorization
from psm_core.methods import at_budget
from psm_core.methods.base import Method
from psm_core.network.compress import compress, stored_parameters
from psm_core.network.data import Dataset, load_data
from psm_core.network.layers import compressible_layers, get_layer
from psm_core.network.models import card_of, model_hash, set_card
from psm_core.progress import OnLayerStep, OnStep, of_layer


@dataclass(frozen=True)
class Point:
    """One thing to compute: a layer with a method, or the whole network (layer `*`) with a plan.

    A plan gives methods by layer; without any it is the dense network. `budget` is the fraction
    that a plan was made for.
    """

    layer: str
    method: Method | None = None
    plan: Mapping[str, Method] | None = None
    budget: float | None = None

    @property
    def method_name(self) -> str:
        """The name of the method at work: `dense` without any, `recipe` for several."""
        return plan_method(self.plan or {}) if self.method is None else self.method.name

    @property
    def label(self) -> str:
        """The point in a few words."""
        if self.method is not None:
            return f"{self.layer} · {self.method}"
        at = "" if self.budget is None else f" at {self.budget:.4g}"
        return f"whole network · {self.method_name}{at}"


def plan_method(plan: Mapping[str, Method]) -> str:
    """The one method of a plan by name, `recipe` where there are several, `dense` without any."""
    names = {method.name for method in plan.values()}
    return names.pop() if len(names) == 1 else "recipe" if names else "dense"


class Study:
    """Fits and evaluations of one model, answered from the store where they are known.

    With `calibration`, the name of a data source, the fits minimize the output error on the inputs that
    the layers receive from it, instead of the error of the weights. Their records carry its name, and
    the output error on the inputs from the study's own data: held out where that is other data. So do
    those of fits to the weights, once the statistics of that data are kept.

    The model must not change while it is studied.
    """

    def __init__(
        self,
        model: nn.Module,
        store: ResultStore,
        data: str = "",
        device: str = "auto",
        calibration: str = "",
    ) -> None:
        self.model = model
        self.store = store
        self.device = device
        choose_device(device, next(iter(model.parameters())))  # a wrong name is an error at once
        self._keys: dict[tuple[str, Method, str | None], str] = {}
        card = card_of(model)
        self.source = card.path or card.source or type(model).__name__
        self.hash = model_hash(model)
        self.data = default_data(model, data)
        if self.data is not None and self.data.images and card.input_shape is None:
            set_card(model, input_shape=tuple(self.data.inputs.shape[1:]))
        self._calibrate(calibration)

    def fitted_to(self, calibration: str) -> Self:
        """The same study with fits to the inputs from other data, or ("") to the weights alone."""
        other = copy.copy(self)
        other._calibrate(calibration)
        return other

    def _calibrate(self, calibration: str) -> None:
        self.calibration = calibration
        self._seen = self._statistics(load_data(calibration)) if calibration else None
        self._held_out = self._seen if self.data is None else self._statistics(self.data)

    def _statistics(self, data: Dataset) -> Calibrations:
        return Calibrations(self.store.root, self.model, self.hash, data, self.device)

    def fit(
        self,
        layer: str,
        method: Method,
        on_step: OnStep | None = None,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> tuple[Record, Factorization]:
        """Factorize one layer, or read the result from the store.

        Statistics of the layer's inputs are computed first where they are wanted and not kept yet.

        Raises:
            UnknownNameError, LayerError, ParameterError, WeightError: bad input.
            CalibrationError, DataError: the statistics cannot be computed.
            StoreError: the result cannot be kept.
        """
        weight = get_layer(self.model, layer).weight.detach()
        self._prepare([layer], on_batch)
        key = self._fit_key(layer, method)
        known = self.store.get(key, self.hash, layer) or self.store.get(key)
        factorization = self.store.factors(key) if known else None
        if known is not None and factorization is not None:
            here = replace(known, model=self.source, model_hash=self.hash, layer=layer)
            if self._held_out is not None and known.data != self._held_out.data.source:
                here = replace(here, **self._output(layer, factorization))
            if (known.model_hash, known.layer, known.data) != (self.hash, layer, here.data):
                self.store.put(replace(here, cached=False))
            return here, factorization
        calibration = None if self._seen is None else self._seen.get(layer, on_batch)
        key = self._fit_key(layer, method)  # another one if a damaged file had to be computed again
        device = choose_device(self.device, weight)
        start = time.perf_counter()
        try:
            factorization = method.fit(weight, on_step, calibration, str(device))
        except (WeightError, FitError) as error:
            raise type(error)(f"layer '{layer}': {error}") from error
        seconds = time.perf_counter() - start
        record = Record(
            key=key,
            model=self.source,
            model_hash=self.hash,
            layer=layer,
            method=method.name,
            params=method.params,
            fraction=factorization.parameters / weight.numel(),
            relative_error=factorization.relative_error(weight),
            parameters=factorization.parameters,
            dense_parameters=weight.numel(),
            nbytes=factorization.to("cpu", weight.dtype).nbytes,
            dense_nbytes=weight.numel() * weight.element_size(),
            seconds=seconds,
            device=str(device),
            note=factorization.note,
            calibration=self.calibration,
            **self._output(layer, factorization),
        )
        self.store.put(record, factorization)
        return record, factorization

    def known(self, plan: Mapping[str, Method]) -> Record | None:
        """The stored record of exactly this plan on this study's data, or None."""
        if self._seen is not None and any(self._seen.hash(layer) is None for layer in plan):
            return None  # nothing was ever fitted to these inputs
        return self.store.get(self._eval_key(plan), self.hash, NETWORK)

    def records(self) -> pd.DataFrame:
        """The stored records of this network: its layers, and the whole on this study's data.

        Whatever they were fitted to; the column `calibration` tells. The output error of a layer is left
        out where it was measured on other data than this study's.
        """
        frame = self.store.query(model_hash=self.hash)
        data = "" if self.data is None else self.data.source
        frame = frame[(frame["layer"] != NETWORK) | (frame["data"] == data)].reset_index(drop=True)
        measured_on = "" if self._held_out is None else self._held_out.data.source
        errors = frame["output_error"].astype(float)
        return frame.assign(output_error=errors.where(frame["data"] == measured_on))

    def network(
        self,
        plan: Mapping[str, Method],
        budget: float | None = None,
        on_step: OnLayerStep | None = None,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> Record:
        """Compress the planned layers and evaluate the whole network, or read it from the store.

        `budget` is the fraction that the plan was made for. Accuracy is left out without data.
        """
        if (known := self.known(plan)) is not None:
            asked = known.params["budget"] if budget is None else budget
            return replace(known, params={**known.params, "budget": asked})
        self._prepare(plan, on_batch)
        fits = {
            name: self.fit(name, method, of_layer(on_step, name), on_batch) for name, method in plan.items()
        }
        small = compress(self.model, {name: fit for name, (_, fit) in fits.items()})
        stored, total = stored_parameters(small), stored_parameters(self.model)
        dense_nbytes = _nbytes(self.model)
        device = choose_device(self.device, next(iter(small.parameters())))
        result = None if self.data is None else evaluate(small.to(device), self.data, on_batch)
        weights = compressible_layers(self.model)
        squares = {name: float(weights[name].weight.detach().double().norm()) ** 2 for name in plan}
        lost = sum(fits[name][0].relative_error ** 2 * square for name, square in squares.items())
        kept = sum(squares.values())
        record = Record(
            key=self._eval_key(plan),
            model=self.source,
            model_hash=self.hash,
            layer=NETWORK,
            method=plan_method(plan),
            params={
                "budget": stored / total if budget is None else budget,
                "plan": {name: method.to_json() for name, method in plan.items()},
            },
            fraction=stored / total,
            relative_error=math.sqrt(lost / kept) if kept else 0.0,
            parameters=stored,
            dense_parameters=total,
            nbytes=dense_nbytes - sum(r.dense_nbytes - r.nbytes for r, _ in fits.values()),
            dense_nbytes=dense_nbytes,
            seconds=math.fsum(record.seconds for record, _ in fits.values()),
            device=str(device),
            accuracy=None if result is None else result.accuracy,
            low=None if result is None else result.low,
            high=None if result is None else result.high,
            samples=None if result is None else result.samples,
            data="" if result is None else result.data,
            calibration=self.calibration if plan else "",
        )
        self.store.put(record)
        return record

    def compute(
        self,
        point: Point,
        on_step: OnLayerStep | None = None,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> Record:
        """The record of one point."""
        if point.method is not None:
            return self.fit(point.layer, point.method, of_layer(on_step, point.layer), on_batch)[0]
        return self.network(point.plan or {}, point.budget, on_step, on_batch)

    def compressed(self, plan: Mapping[str, Method]) -> nn.Module:
        """A compressed copy of the model, its factors read from the store where they are known."""
        return compress(self.model, {name: self.fit(name, m)[1] for name, m in plan.items()})

    def _prepare(self, layers: Iterable[str], on_batch: Callable[[int, int], None] | None) -> None:
        """Compute the statistics that fits of these layers need and that are not kept yet."""
        if self._seen is not None and self._held_out is not None:
            self._seen.prepare(layers, on_batch)
            self._held_out.prepare(layers, on_batch)

    def _output(self, layer: str, factorization: Factorization) -> dict[str, Any]:
        """The output error of a fit, and the data behind it; nothing where no statistics are kept."""
        if self._held_out is None or self._held_out.hash(layer) is None:
            return {}
        weight = get_layer(self.model, layer).weight
        error = factorization.output_error(weight, self._held_out.get(layer))
        return {"output_error": error, "data": self._held_out.data.source}

    def _fit_key(self, layer: str, method: Method) -> str:
        """The key of a fit; a weight's bytes are hashed once."""
        calibration = None if self._seen is None else self._seen.hash(layer)
        if (layer, method, calibration) not in self._keys:
            weight = get_layer(self.model, layer).weight
            self._keys[layer, method, calibration] = fit_key(method, weight, calibration)
        return self._keys[layer, method, calibration]

    def _eval_key(self, plan: Mapping[str, Method]) -> str:
        keys = {name: self._fit_key(name, method) for name, method in plan.items()}
        return eval_key(keys, self.hash, None if self.data is None else self.data.fingerprint)


def sweep_points(
    model: nn.Module,
    methods: Iterable[str],
    fractions: Iterable[float],
    layers: Iterable[str] | None = None,
    network: bool = True,
) -> tuple[list[Point], list[str]]:
    """The points of a sweep: the dense network, then for each budget each layer and the network.

    Also returns, in words, the points a method cannot reach (its smallest setting stores more).

    Raises:
        UnknownNameError: an unknown layer or method.
        ParameterError: a fraction out of range.
    """
    names = list(compressible_layers(model) if layers is None else layers)
    shapes = {name: tuple(get_layer(model, name).weight.shape) for name in names}
    points, skipped = [Point(NETWORK, plan={})] if network else [], []
    methods = list(dict.fromkeys(methods))
    for fraction in sorted(set(fractions)):
        for method in methods:
            for name, shape in shapes.items():
                try:
                    points.append(Point(name, method=at_budget(method, shape, fraction)))
                except BudgetError as error:
                    skipped.append(f"{name}: {error}")
            if network:
                try:
                    plan = uniform_plan(model, method, fraction).layers
                    points.append(Point(NETWORK, plan=plan, budget=fraction))
                except BudgetError as error:
                    skipped.append(f"whole network: {error}")
    return points, skipped


def _nbytes(model: nn.Module) -> int:
    """Bytes of a network's state, shared tensors counted once."""
    state = {id(t): t for t in model.state_dict(keep_vars=True).values() if isinstance(t, torch.Tensor)}
    return sum(t.numel() * t.element_size() for t in state.values())
