"""Networks by name: one string each, with a card that says where a network comes from."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from psm_core import demo
from psm_core.errors import ModelError, UnknownNameError, first_line

PREFIXES = ("demo:NAME", "torchvision:NAME", "timm:NAME", "hf:NAME", "package.module:callable")


@dataclass(frozen=True)
class ModelCard:
    """What a network is and needs, kept with it as `model.psm_card`.

    `source` is the string that builds its architecture, `path` the checkpoint it was read from (if
    it was), `input_shape` that of one input without the
    batch, `data` the default data source, `base_hash` that of the dense weights (set when a
    compressed copy is made), `notice` what a user should know of how it was loaded.
    """

    source: str = ""
    path: str = ""
    input_shape: tuple[int, ...] | None = None
    data: str = ""
    base_hash: str = ""
    notice: str = ""


def card_of(model: nn.Module) -> ModelCard:
    """The model's card; an empty one for a network that was not loaded by name."""
    card = getattr(model, "psm_card", None)
    return card if isinstance(card, ModelCard) else ModelCard()


def build_model(source: str, weights: bool) -> nn.Module:
    """The network of a source string other than a path; random weights unless `weights`."""
    prefix, _, name = source.partition(":")
    builders: dict[str, Callable[[str, bool], nn.Module]] = {
        "demo": _demo,
        "torchvision": _torchvision,
        "timm": _timm,
        "hf": _huggingface,
    }
    if not name or not prefix:
        raise ModelError(
            f"'{source}' is neither an existing file nor a model name; expected "
            f"{', '.join(PREFIXES)} or the path of a checkpoint"
        )
    model = builders[prefix](name, weights) if prefix in builders else _callable(prefix, name)
    if next(model.parameters(), None) is None:
        raise ModelError(f"'{source}' has no parameters; there is nothing to compress")
    if any(tensor.is_meta for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor)):
        raise ModelError(f"'{source}' is on the meta device, without values; expected one with weights")
    return set_card(model, source=source).eval()


def model_hash(model: nn.Module) -> str:
    """SHA-256 over all parameters and buffers, and over what the model does with them.

    The latter is its structure as printed (strides, paddings, activations) and the source of the
    `forward` of each class outside torch.
    """
    structure = re.sub(r" at 0x[0-9a-f]+", "", repr(model))
    for kind in sorted({type(m) for m in model.modules()}, key=lambda k: f"{k.__module__}.{k.__qualname__}"):
        if not kind.__module__.startswith("torch."):
            with contextlib.suppress(OSError, TypeError):  # defined where there is no file
                structure += inspect.getsource(kind.forward)
    return tensors_hash(
        {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}, structure
    )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards each module is in its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def tensors_hash(tensors: Mapping[str, torch.Tensor], description: str = "") -> str:
    """SHA-256 over a description and the names, types, shapes and bytes of tensors."""
    digest = hashlib.sha256(description.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a tensor of any type."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data


def set_card(model: nn.Module, **known: Any) -> nn.Module:
    """Put what is known on the model's card; returns the model."""
    model.psm_card = replace(card_of(model), **known)  # type: ignore[assignment]
    return model


def _demo(name: str, weights: bool) -> nn.Module:
    if name not in demo.NETWORKS:
        raise UnknownNameError("demonstration network", name, demo.NETWORKS)
    shape = tuple(demo.NETWORKS[name].input_shape)
    return set_card(demo.load_network(name, weights), input_shape=shape, data="demo:test")


def _pretrained_or_random(
    build: Callable[[bool], nn.Module], weights: bool, name: str
) -> tuple[nn.Module, str]:
    """Build with pretrained weights, or with random ones (of a fixed seed) where there are none."""
    if weights:
        try:
            return build(True), ""
        except (OSError, RuntimeError) as error:
            reason = first_line(error)
            notice = f"{name} has random weights: pretrained ones could not be had ({reason})"
    else:
        notice = ""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build(False), notice


def _torchvision(name: str, weights: bool) -> nn.Module:
    from torchvision import models

    if name not in models.list_models():
        raise UnknownNameError("torchvision model", name, models.list_models())
    best = models.get_model_weights(name).DEFAULT

    def build(pretrained: bool) -> nn.Module:
        options: dict[str, Any] = {"weights": best if pretrained else None}
        if hasattr(models.detection, name) or hasattr(models.segmentation, name):
            options["weights_backbone"] = None
        network: nn.Module = models.get_model(name, **options)
        return network

    model, notice = _pretrained_or_random(build, weights, f"torchvision:{name}")
    preset = best.transforms()
    crop = getattr(preset, "crop_size", None)
    side = crop[0] if isinstance(crop, list | tuple) else crop
    is_image = isinstance(side, int) and not hasattr(models.video, name)
    return set_card(model, input_shape=(3, side, side) if is_image else None, notice=notice)


def _timm(name: str, weights: bool) -> nn.Module:
    timm = _optional("timm", f"timm:{name}")
    if not timm.is_model(name):
        raise UnknownNameError("timm model", name, timm.list_models())
    model, notice = _pretrained_or_random(
        lambda pretrained: timm.create_model(name, pretrained=pretrained), weights, f"timm:{name}"
    )
    shape = tuple(timm.data.resolve_model_data_config(model)["input_size"])
    return set_card(model, input_shape=shape, notice=notice)


def _huggingface(name: str, weights: bool) -> nn.Module:
    transformers = _optional("transformers", f"hf:{name}")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        build = transformers.AutoModel
        model, notice = _pretrained_or_random(
            lambda pretrained: build.from_pretrained(name) if pretrained else build.from_config(config),
            weights,
            f"hf:{name}",
        )
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise ModelError(f"hf:{name} cannot be loaded: {reason}") from error
    return set_card(model, notice=notice)


def _optional(package: str, source: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ModelError(
            f"'{source}' needs the package {package}, which is not installed: pip install {package}"
        ) from None


def _callable(module_name: str, name: str) -> nn.Module:
    """The module that a callable of an importable package returns.

    A checkpoint may name one, so only what a user could have written is called: a Python function
    or a class of modules, not of the standard library.
    """
    source = f"{module_name}:{name}"
    if _standard(module_name):
        raise ModelError(f"'{source}' belongs to Python's standard library; expected a network")
    try:
        target: Any = importlib.import_module(module_name)
        for part in name.split("."):
            target = getattr(target, part)
    except (Exception, SystemExit) as error:  # whatever a user's own module raises
        raise ModelError(
            f"'{source}' cannot be imported ({type(error).__name__}: {error}); expected "
            f"package.module:callable, importable from here, or one of {', '.join(PREFIXES[:-1])}"
        ) from error
    is_module_class = isinstance(target, type) and issubclass(target, nn.Module)
    if not is_module_class and not isinstance(target, types.FunctionType):
        raise ModelError(f"'{source}' is neither a function nor a class of nn.Module")
    if _standard(str(target.__module__)):
        raise ModelError(f"'{source}' is {target.__module__}.{target.__name__}; expected a network")
    try:
        model = target()
    except (Exception, SystemExit) as error:  # whatever a user's own code raises
        raise ModelError(f"{source}() failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{source}() returned {type(model).__name__}; expected an nn.Module")
    return model


def _standard(module_name: str) -> bool:
    """Whether a module is of Python's standard library."""
    return module_name.split(".")[0] in sys.stdlib_module_names
