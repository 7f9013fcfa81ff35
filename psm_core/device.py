"""Where to compute."""

from __future__ import annotations

import torch
from torch import Tensor

from psm_core.errors import ParameterError, first_line


def choose_device(device: str, weight: Tensor) -> torch.device:
    """The device to compute on: the named one, else the weight's accelerator, else the best there is.

    Raises:
        ParameterError: a device of this name cannot be used here.
    """
    if device == "auto":
        if weight.device.type != "cpu":
            return weight.device
        if torch.cuda.is_available():
            return torch.device("cuda")
        if torch.backends.mps.is_available() and weight.dtype != torch.float64:
            return torch.device("mps")
        return torch.device("cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ParameterError(
            f"device '{device}' cannot be used here ({first_line(error)}); expected auto, cpu, cuda or mps"
        ) from None
    return chosen
