"""A method is a frozen dataclass: its fields are its declared parameters, `fit` runs it."""

from __future__ import annotations

import dataclasses
import math
import numbers
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from psm_core.device import choose_device
from psm_core.errors import (
    BudgetError,
    FitError,
    ParameterError,
    UnknownNameError,
    WeightError,
    first_line,
)
from psm_core.factorization import Factorization
from psm_core.network.calibration import Calibration
from psm_core.progress import OnStep, Report, Step

Shape = tuple[int, ...]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What forms, validation, JSON and the command line need to know of one parameter."""

    help: str
    kind: type
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()

    def check(self, method: str, name: str, value: Any) -> Any:
        """The value in its declared type.

        Raises:
            ParameterError: wrong type, out of range, or not among the choices.
        """
        given = f"{method}: {name} = {value!r}"
        if self.kind is str:
            if value not in self.choices:
                raise ParameterError(f"{given} is unknown; expected one of {', '.join(self.choices)}")
            return value
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not abs(value) <= sys.float_info.max:
            raise ParameterError(f"{given} is not a finite number; expected {self.range_text}")
        if self.kind is int and value != int(value):
            raise ParameterError(f"{given} is not whole; expected {self.range_text}")
        low, high, above = self.minimum, self.maximum, self.above
        too_low = (low is not None and value < low) or (above is not None and value <= above)
        if too_low or (high is not None and value > high):
            raise ParameterError(f"{given} is out of range; expected {self.range_text}")
        return self.kind(value)

    @property
    def range_text(self) -> str:
        """The allowed values in words."""
        text = "a whole number" if self.kind is int else "a number"
        if self.minimum is not None:
            text += f" of at least {self.minimum:g}"
        if self.above is not None:
            text += f" above {self.above:g}"
        return text if self.maximum is None else f"{text} and at most {self.maximum:g}"


def parameter(help: str, kind: type, default: Any = dataclasses.MISSING, **limits: Any) -> Any:
    """Declare a dataclass field as a method's parameter."""
    return dataclasses.field(default=default, metadata={"parameter": Parameter(help, kind, **limits)})


@dataclasses.dataclass(frozen=True)
class Method(ABC):
    """A factorization method with its parameters.

    A subclass declares its parameters as fields, gives `storage` and `_factorize`, and, where its
    size is not governed by a single whole number, `at_budget`. Everything else (validation, JSON,
    forms, cache keys, the module) is derived.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    version: ClassVar[int]
    size_parameter: ClassVar[str]
    """The parameter that a budget determines."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = self.parameters()[field.name].check(self.name, field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @classmethod
    def parameters(cls) -> dict[str, Parameter]:
        """The declared parameters by name."""
        return {f.name: f.metadata["parameter"] for f in dataclasses.fields(cls)}

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """Build from a mapping of parameter values.

        Raises:
            UnknownNameError: a name is not a parameter of this method.
            ParameterError: a value is out of range, or a required one is missing.
        """
        for name in params:
            if name not in cls.parameters():
                raise UnknownNameError(f"parameter of {cls.name}", name, cls.parameters())
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name not in params:
                limits = cls.parameters()[field.name]
                raise ParameterError(
                    f"{cls.name} needs {field.name} ({limits.help}); expected {limits.range_text}"
                )
        return cls(**params)

    @classmethod
    def check_fixed(cls, fixed: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters set by hand beside a budget, in their declared types.

        Raises:
            UnknownNameError: a name is not a parameter of this method.
            ParameterError: a value is out of range, or nothing is left for the budget to determine.
        """
        declared = cls.parameters()
        for name in fixed:
            if name not in declared:
                raise UnknownNameError(f"parameter of {cls.name}", name, declared)
        sizes = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        if all(name in fixed for name in sizes):
            raise ParameterError(
                f"{cls.name}: a budget determines {' or '.join(sizes)}; give either the budget or "
                f"{' and '.join(sizes)}"
            )
        return {name: declared[name].check(cls.name, name, value) for name, value in fixed.items()}

    @property
    def params(self) -> dict[str, Any]:
        """The parameter values by name."""
        return dataclasses.asdict(self)

    def to_json(self) -> dict[str, Any]:
        """`{"method": name, "version": …, "params": {…}}`; `method_from_json` reads it back."""
        return {"method": self.name, "version": self.version, "params": self.params}

    @property
    def setting(self) -> str:
        """The parameters that differ from their defaults, in words: `K=10, Q=3`."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return ", ".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in self.params.items()
            if value != defaults[name]
        )

    def __str__(self) -> str:
        return f"{self.title} ({self.setting})" if self.setting else self.title

    # Sizes

    @abstractmethod
    def storage(self, shape: Shape) -> int:
        """Floats stored for a weight of this shape, without fitting it."""

    @classmethod
    def largest(cls, shape: Shape, name: str, **fixed: Any) -> float:
        """The largest value of parameter `name` that makes sense for this shape.

        `fixed` holds the other parameters, where the answer depends on them.
        """
        limits = cls.parameters()[name]
        return math.inf if limits.maximum is None else limits.maximum

    def check_shape(self, shape: Shape) -> None:
        """Raise ParameterError when a parameter is out of range for this shape."""
        for name, value in self.params.items():
            others = {other: v for other, v in self.params.items() if other != name}
            if isinstance(value, int | float) and value > (top := self.largest(shape, name, **others)):
                raise ParameterError(
                    f"{self.name}: {name} = {value:g} is out of range for a weight of shape "
                    f"{shape_text(shape)}; expected at most {top:g}"
                )

    @classmethod
    def at_budget(cls, shape: Shape, fraction: float, **fixed: Any) -> Self:
        """The setting that stores at most `fraction` of the weights, as close to it as possible.

        `fixed` sets other parameters by hand.

        Raises:
            ParameterError: the fraction is not in (0, 1].
            BudgetError: even the smallest setting stores more.
        """
        budget = floats_in_budget(shape, fraction)
        name = cls.size_parameter
        # Each step of a size stores at least one float more.
        low, high = 1, int(min(cls.largest(shape, name, **fixed), budget))
        if cls.smallest(shape, **fixed).storage(shape) > budget:
            raise cls.too_small(shape, fraction, **fixed)
        while low < high:
            middle = (low + high + 1) // 2
            if cls.from_params({**fixed, name: middle}).storage(shape) <= budget:
                low = middle
            else:
                high = middle - 1
        return cls.from_params({**fixed, name: low})

    @classmethod
    def smallest(cls, shape: Shape, **fixed: Any) -> Self:
        """The setting that stores the fewest floats for this shape."""
        return cls.from_params({**fixed, cls.size_parameter: 1})

    @classmethod
    def too_small(cls, shape: Shape, fraction: float, **fixed: Any) -> BudgetError:
        """The error for a budget under the smallest setting."""
        setting = cls.smallest(shape, **fixed)
        stored = setting.storage(shape)
        reachable = stored / math.prod(shape)
        return BudgetError(
            f"{cls.name} cannot store a weight of shape {shape_text(shape)} in {fraction:.4g} of its "
            f"floats: its smallest setting, {setting}, takes {stored:,} ({reachable:.4g}); raise the "
            f"budget to at least {math.ceil(reachable * 1e4) / 1e4:g}, or choose psm or prune",
            reachable,
        )

    # Fitting

    @abstractmethod
    def _factorize(self, weight: Tensor, report: Report, metric: Tensor | None) -> Factorization:
        """Factorize a finite weight of which the largest entry lies in [1, 2): a copy, to be overwritten.

        `metric` is None, or the positive definite (n, n) matrix M, n = in·kh·kw, that errors are to be
        measured in: ‖(W − Ŵ) M^½‖_F, of the weight's type and on its device. The factors are meant to
        be better in it than those found without.
        """

    def fit(
        self,
        weight: Tensor,
        on_step: OnStep | None = None,
        calibration: Calibration | None = None,
        device: str = "auto",
    ) -> Factorization:
        """Factorize a weight of shape (out, in) or (out, in, kh, kw).

        Half-precision weights are fitted and returned in float32, float64 stays float64. `device`
        is "auto" (the weight's accelerator, else the best there is) or a torch device name; the
        factors come back on the weight's device. `on_step` receives a `Step` an iteration and stops
        the work by raising. `history` has one error an iteration, the last being the exact one of what
        is returned.

        With the `calibration` of the layer the fit minimizes the error of its outputs,
        ‖(W − Ŵ) M^½‖_F / ‖W M^½‖_F with M the regularised second moment (`Calibration.regularised`), and
        the errors of the steps and of `history` are in this metric. `relative_error` of what is
        returned stays that of the weights, `output_error` has C as it was measured.

        Raises:
            WeightError: empty, not finite, not floating point, or not 2-D or 4-D.
            ParameterError: a parameter is out of range for this shape, or the calibration is that of
                another shape.
            FitError: the computation did not converge or ran out of memory.
        """
        check_weight(weight)
        shape = tuple(weight.shape)
        self.check_shape(shape)
        if calibration is not None and not isinstance(calibration, Calibration):
            raise ParameterError(
                f"expected calibration=None or a Calibration of this layer from psm.calibrate(model, "
                f"data), got {type(calibration).__name__}"
            )
        if calibration is not None:
            calibration.check(shape)
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        work = weight.detach().to(choose_device(device, weight), dtype)
        regular = None if calibration is None else calibration.regularised()
        largest = float(work.abs().max())
        # A power of two: scaling by it and back is exact, so pruned weights stay bit-equal.
        exponent = math.floor(math.log2(largest)) if largest > 0 else 0
        errors: dict[int, float] = {}
        is_outside = False

        def report(iteration: int, total: int, relative_error: float) -> None:
            nonlocal is_outside
            if iteration:  # 0 is a sign of life before the first one
                errors[iteration] = relative_error
            if on_step is not None:
                is_outside = True
                on_step(Step(iteration, total, relative_error))
                is_outside = False

        try:
            metric = None if regular is None else regular.second_moment.to(dtype).to(work.device)
            fitted = self._factorize(work / 2.0**exponent, report, metric)
        except (RuntimeError, MemoryError, ArithmeticError) as error:
            if is_outside:  # the callback's own
                raise
            raise FitError(
                f"{self} failed on a weight of shape {shape_text(shape)} on {work.device.type}: "
                f"{first_line(error)}; try a smaller setting or --device cpu"
            ) from error
        rescaled = fitted.scaled(exponent).to(weight.device, dtype)
        last = rescaled.relative_error(weight) if regular is None else rescaled.output_error(weight, regular)
        if not math.isfinite(last):
            raise FitError(
                f"{self} gave no finite approximation of a weight of shape {shape_text(shape)}, with entries "
                f"up to {largest:.2g}; try another setting, or fit it in float64"
            )
        return dataclasses.replace(rescaled, history=(*list(errors.values())[:-1], last))


def check_weight(weight: Tensor) -> None:
    """Raise WeightError unless the weight can be factorized."""
    if not isinstance(weight, Tensor):
        raise WeightError(f"expected a torch tensor as weight, got {type(weight).__name__}")
    if weight.is_meta or weight.layout is not torch.strided:
        kind = "one on the meta device" if weight.is_meta else f"one of layout {weight.layout}"
        raise WeightError(f"expected a weight with stored values, got {kind}; load or densify it first")
    if weight.dtype not in FLOATS:
        raise WeightError(
            f"expected a floating-point weight, got {weight.dtype}; convert it to float32 first"
        )
    check_weight_shape(tuple(weight.shape))
    bad = int((~torch.isfinite(weight)).sum())
    if bad:
        raise WeightError(
            f"expected finite weights, got {bad} NaN or infinite among {weight.numel():,}; "
            "repair or retrain the layer first"
        )


def check_weight_shape(shape: Shape) -> None:
    """Raise WeightError unless a weight of this shape can be factorized."""
    if len(shape) not in (2, 4):
        raise WeightError(f"expected a weight of shape (out, in) or (out, in, kh, kw), got shape {shape}")
    if min(shape) < 1:
        raise WeightError(f"expected a weight with entries, got an empty one of shape {shape}")


def floats_in_budget(shape: Shape, fraction: float) -> int:
    """The largest number of floats within `fraction` of a weight's entries."""
    is_number = isinstance(fraction, numbers.Real) and not isinstance(fraction, bool)
    if not is_number or not 0 < fraction <= 1:
        raise ParameterError(
            f"budget fraction = {fraction!r} is out of range; expected a number above 0 and up to 1"
        )
    # 0.07 · 300 is 21.000000000000004 in binary, 0.29 · 100 is 28.999999999999996
    return math.floor(float(fraction) * math.prod(shape) + 1e-6)


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """(out, in·kh·kw) of a weight's shape."""
    return shape[0], math.prod(shape[1:])


def shape_text(shape: Shape) -> str:
    """A shape as people write it: 128×64×3×3."""
    return "×".join(map(str, shape))
