"""Where networks run, and what is afterwards as it was before."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


def find_device(name: torch.device | str) -> torch.device:
    """The device of that name, if there is such a one here and it holds values.

    >>> find_device("cpu")
    device(type='cpu')
    >>> find_device("gpu")
    Traceback (most recent call last):
    ValueError: the device is 'gpu'; give 'cpu' or 'cuda'
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"the device is {str(name)!r}; give 'cpu' or 'cuda'") from error
    if device.type == "meta":
        raise ValueError("the device is 'meta', on which tensors have no values; give 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"the device is {str(device)!r}, and torch sees no GPU here; leave it out")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(
            f"the device is {str(device)!r}, and torch sees {count} here; give 'cuda:{count - 1}' or less"
        )
    try:
        if device.type != "cuda":
            torch.empty(1, device=device)
    except Exception as error:  # each backend has errors of its own for not being there
        raise ValueError(
            f"the device is {str(name)!r}, which this torch does not have here; leave it out"
        ) from error
    return device


def auto_device(name: str) -> torch.device:
    """The device of that name; for "auto" a GPU where there is one, else the CPU.

    >>> auto_device("cpu")
    device(type='cpu')
    """
    return find_device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def device_of(net: nn.Module) -> torch.device:
    """Where a network is, by its first weight; a network without weights is on the CPU.

    >>> device_of(nn.Flatten())
    device(type='cpu')
    """
    return next((weight.device for weight in net.parameters()), torch.device("cpu"))


@contextmanager
def modes_kept(nets: Sequence[nn.Module]) -> Iterator[None]:
    """Each of the networks' modules is afterwards in the mode, of training or evaluation, that it was in."""
    training = [(module, module.training) for net in nets for module in net.modules()]
    try:
        yield
    finally:
        for module, was in training:
            module.training = was


@contextmanager
def evaluation_mode(nets: Iterable[nn.Module]) -> Iterator[None]:
    """Networks in evaluation mode; afterwards each of their modules is in the mode that it was in.

    >>> net = nn.Dropout()
    >>> with evaluation_mode([net]):
    ...     print(net.training)
    False
    >>> net.training
    True
    """
    nets = list(nets)
    with modes_kept(nets):
        for net in nets:
            net.eval()
        yield


@contextmanager
def brought_to(device: torch.device, nets: Sequence[nn.Module]) -> Iterator[None]:
    """Networks on a device; afterwards each is where it was, in the mode that it was in, come what may."""
    gpus = []
    if device.type == "cuda":
        gpus = [torch.cuda.current_device() if device.index is None else device.index]
    with modes_kept(nets), ExitStack() as afterwards, torch.random.fork_rng(gpus):
        for net in nets:
            afterwards.callback(_bring_back, net, device_of(net), _devices(net))
        for net in nets:
            net.to(device)
        yield


def _devices(net: nn.Module) -> list[tuple[dict[str, Any], str, torch.device]]:
    """Where each weight and buffer is, since one network may lie on several devices."""
    return [
        (tensors, name, tensor.device)
        for module in net.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]


def _bring_back(
    net: nn.Module, home: torch.device, devices: list[tuple[dict[str, Any], str, torch.device]]
) -> None:
    net.to(home)
    for tensors, name, device in devices:
        if tensors[name].device != device:
            tensors[name].data = tensors[name].data.to(device)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """The global random states of torch's CPU generator, numpy and Python are afterwards as before.

    >>> before = torch.random.get_rng_state()
    >>> with random_state_kept():
    ...     _ = torch.rand(3)
    >>> torch.random.get_rng_state().equal(before)
    True
    """
    arrays, numbers = np.random.get_state(), random.getstate()  # noqa: NPY002 - users' code may draw from it
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        np.random.set_state(arrays)  # noqa: NPY002
        random.setstate(numbers)
