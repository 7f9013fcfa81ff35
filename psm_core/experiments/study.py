"""A study: one model, its data and the store; every result is computed once and kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from psm_core.errors import BudgetError
from psm_core.experiments.evaluation import default_data, evaluate
from psm_core.experiments.keys import eval_key, fit_key
from psm_core.experiments.plan import uniform_plan
from psm_core.experiments.record import NETWORK, Record
from psm_core.experiments.store import ResultStore
from psm_core.factorization import Factorization
from psm_core.methods import at_budget
from psm_core.methods.base import Method, choose_device
from psm_core.network.compress import compress, stored_parameters
from psm_core.network.layers import compressible_layers, get_layer
from psm_core.network.models import card_of, model_hash, set_card
from psm_core.progress import OnStep, Step


@dataclass(frozen=True)
class Point:
    """One thing to compute: a layer with a method, or the whole network at a budget.

    Exactly one of `method` (with a layer's name), `plan` (layer → method) and `fraction` (with the
    `family`, a method's name) is set; the dense network itself is a plan without layers.
    """

    layer: str
    method: Method | None = None
    plan: Mapping[str, Method] | None = None
    family: str = ""
    fraction: float = 1.0

    @property
    def label(self) -> str:
        """The point in a few words."""
        if self.method is not None:
            return f"{self.layer} · {self.method}"
        if self.plan is not None:
            return "whole network · recipe" if self.plan else "whole network · dense"
        return f"whole network · {self.family} at {self.fraction:.4g}"


class Study:
    """Fits and evaluations of one model, answered from the store where they are known."""

    def __init__(self, model: nn.Module, store: ResultStore, data: str = "", device: str = "auto") -> None:
        self.model = model
        self.store = store
        self.device = device
        card = card_of(model)
        self.source = card.path or card.source or type(model).__name__
        self.hash = model_hash(model)
        self.data = default_data(model, data)
        if self.data is not None and self.data.images and card.input_shape is None:
            set_card(model, input_shape=tuple(self.data.inputs.shape[1:]))

    def fit(self, layer: str, method: Method, on_step: OnStep | None = None) -> tuple[Record, Factorization]:
        """Factorize one layer, or read the result from the store.

        Raises:
            UnknownNameError, LayerError, ParameterError, WeightError: bad input.
            StoreError: the result cannot be kept.
        """
        module = get_layer(self.model, layer)
        weight = module.weight.detach()
        key = fit_key(method, weight)
        known = self.store.get(key, self.hash, layer) or self.store.get(key)
        factorization = self.store.factors(key) if known else None
        if known is not None and factorization is not None:
            here = replace(known, model=self.source, model_hash=self.hash, layer=layer)
            if (known.model_hash, known.layer) != (self.hash, layer):
                self.store.put(replace(here, cached=False))
            return here, factorization
        device = choose_device(self.device, weight)
        start = time.perf_counter()
        factorization = method.fit(weight, on_step=on_step, device=str(device))
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
            nbytes=factorization.nbytes,
            dense_nbytes=weight.numel() * weight.element_size(),
            seconds=seconds,
            device=str(device),
            note=factorization.note,
        )
        self.store.put(record, factorization)
        return record, factorization

    def network(
        self,
        plan: Mapping[str, Method],
        family: str = "recipe",
        budget: float | None = None,
        on_step: Callable[[str, Step], None] | None = None,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> Record:
        """Compress the planned layers and evaluate the whole network, or read it from the store.

        Accuracy is left out where there is no data.
        """
        keys = {n: fit_key(m, get_layer(self.model, n).weight) for n, m in plan.items()}
        fingerprint = None if self.data is None else self.data.fingerprint
        key = eval_key(keys, self.hash, fingerprint)
        if (known := self.store.get(key, self.hash, NETWORK)) is not None:
            return known
        fits: dict[str, tuple[Record, Factorization]] = {}
        for name, method in plan.items():
            report = None if on_step is None else _named(on_step, name)
            fits[name] = self.fit(name, method, report)
        small = compress(self.model, {name: fit for name, (_, fit) in fits.items()})
        device = choose_device(self.device, next(iter(small.parameters())))
        result = None
        if self.data is not None:
            result = evaluate(small.to(device), self.data, on_batch)
        dense_bytes, weights = _nbytes(self.model), compressible_layers(self.model)
        saved = sum(record.dense_nbytes - record.nbytes for record, _ in fits.values())
        lost = kept = 0.0
        for name, (record, _) in fits.items():
            norm = float(weights[name].weight.detach().double().norm())
            lost += (record.relative_error * norm) ** 2
            kept += norm**2
        stored, total = stored_parameters(small), stored_parameters(self.model)
        record = Record(
            key=key,
            model=self.source,
            model_hash=self.hash,
            layer=NETWORK,
            method=family,
            params={
                "budget": stored / total if budget is None else budget,
                "plan": {n: {"method": m.name, "params": m.params} for n, m in plan.items()},
            },
            fraction=stored / total,
            relative_error=math.sqrt(lost / kept) if kept else 0.0,
            parameters=stored,
            dense_parameters=total,
            nbytes=dense_bytes - saved,
            dense_nbytes=dense_bytes,
            seconds=math.fsum(record.seconds for record, _ in fits.values()),
            device=str(device),
            accuracy=None if result is None else result.accuracy,
            low=None if result is None else result.low,
            high=None if result is None else result.high,
            samples=None if result is None else result.samples,
            data="" if result is None else result.data,
        )
        self.store.put(record)
        return record

    def compute(
        self,
        point: Point,
        on_step: Callable[[str, Step], None] | None = None,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> Record:
        """The record of one point."""
        if point.method is not None:
            report = None if on_step is None else _named(on_step, point.layer)
            return self.fit(point.layer, point.method, report)[0]
        if point.plan is not None:
            family = "recipe" if point.plan else "dense"
            return self.network(point.plan, family, None, on_step, on_batch)
        plan = uniform_plan(self.model, point.family, point.fraction)
        return self.network(plan.layers, point.family, point.fraction, on_step, on_batch)

    def compressed(self, plan: Mapping[str, Method]) -> nn.Module:
        """A compressed copy of the model, its factors read from the store where they are known."""
        return compress(self.model, {name: self.fit(name, m)[1] for name, m in plan.items()})


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
    methods = list(methods)
    for fraction in sorted(set(fractions)):
        for method in methods:
            for name, shape in shapes.items():
                try:
                    points.append(Point(name, method=at_budget(method, shape, fraction)))
                except BudgetError as error:
                    skipped.append(f"{name}: {error}")
            if network:
                try:
                    uniform_plan(model, method, fraction)
                    points.append(Point(NETWORK, family=method, fraction=fraction))
                except BudgetError as error:
                    skipped.append(f"whole network: {error}")
    return points, skipped


def _named(on_step: Callable[[str, Step], None], name: str) -> OnStep:
    return lambda step: on_step(name, step)


def _nbytes(model: nn.Module) -> int:
    """Bytes of a network's state, shared tensors counted once."""
    state = {id(t): t for t in model.state_dict(keep_vars=True).values() if isinstance(t, torch.Tensor)}
    return sum(t.numel() * t.element_size() for t in state.values())
