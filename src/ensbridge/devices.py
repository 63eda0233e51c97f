"""Where networks run."""

from __future__ import annotations

import torch


def find_device(name: torch.device | str) -> torch.device:
    """The device of that name, if there is such a one here.

    >>> find_device("cpu")
    device(type='cpu')
    >>> find_device("gpu")
    Traceback (most recent call last):
    ValueError: the device is 'gpu'; give such as 'cpu' or 'cuda'
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"the device is {str(name)!r}; give such as 'cpu' or 'cuda'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"the device is {str(name)!r}, and torch sees no GPU here; leave it out")
    return device
