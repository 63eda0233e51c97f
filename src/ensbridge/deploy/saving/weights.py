"""Weights and buffers as one safetensors file: written once each, compared before memory is taken, filled."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ensbridge.utils.text import one_line, short

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LARGEST_WEIGHTS = 2**36  # bytes of the file; those of the largest classifiers have half of that
MOST_TENSORS = 50_000  # as long as a file has more, a description could ask for as many layers
COPY_AGAIN = "copy the whole folder again, or save the model again"
GIVE_SAME = "give the source as it was saved, or copy the whole folder again"


class Entry(NamedTuple):
    """What a file or a network has under a name."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None for one that no network of torch's has

    def __str__(self) -> str:
        return f"{'an unknown type' if self.dtype is None else str(self.dtype)[6:]} of shape {self.shape}"


Layout = Mapping[str, Entry]


def pack(model: nn.Module) -> tuple[bytes, dict[str, str]]:
    """The file's content, and for each tensor that a module shares with another: under which name it lies."""
    kept: dict[int, str] = {}
    tied: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES.values() or tensor.is_meta:
            kind = "a tensor without values" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            kind = str(tensor.dtype) if isinstance(tensor, Tensor) and not tensor.is_meta else kind
            raise ValueError(f"{name} of the model is {kind}, which cannot be saved; make it a plain tensor")
        if id(tensor) in kept:
            tied[name] = kept[id(tensor)]
        else:
            kept[id(tensor)] = name
            # A copy: tensors that share memory otherwise, as views do, are refused by safetensors.
            held[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    check_values(model, held, "this model")
    # One entry of metadata at most: with several, their order in the file would change from run to run.
    return save(held, {"format": "pt"}), tied


def digest(path: Path) -> str:
    """The SHA-256 of a file, read piece by piece."""
    sha256 = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while piece := file.read(2**20):
                sha256.update(piece)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    return sha256.hexdigest()


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file; one that is none is refused in a sentence."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no whole safetensors file ({one_line(error)}); {COPY_AGAIN}") from error


def layout_of_file(file: Any, where: str) -> Layout:
    """What a file has, from its header alone."""
    if len(file.keys()) > MOST_TENSORS:
        raise ValueError(
            f"{where} has {len(file.keys())} tensors, a model's has at most {MOST_TENSORS}; {COPY_AGAIN}"
        )
    parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    return {
        name: Entry(tuple(part.get_shape()), _DTYPES.get(part.get_dtype())) for name, part in parts.items()
    }


def layout_of(model: nn.Module) -> Layout:
    """What a model has."""
    return {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in _tensors(model).items()}


def compare(
    there: Layout, here: Layout, tied: Mapping[str, str], where: str, remedy: str = COPY_AGAIN
) -> None:
    """Refuse a file that does not have exactly what a model needs; the first difference is named."""
    for alias, name in tied.items():
        if name not in there or alias in there or alias not in here:
            raise ValueError(
                f"{where}: {short(alias)} cannot be the tensor {short(name)}, as is described; {remedy}"
            )
    for name, entry in here.items():
        stored = there.get(tied.get(name, name))
        if stored is None:
            raise ValueError(f"{where} has no {short(name)}, which the model has; {remedy}")
        # Weights may be of any floating type, as a model may be; counters and masks are what they are.
        floats = [side.dtype is not None and side.dtype.is_floating_point for side in (stored, entry)]
        fits = stored.dtype == entry.dtype or all(floats)
        if stored.shape != entry.shape or not fits:
            raise ValueError(f"{where} has {short(name)} as {stored}, the model as {entry}; {remedy}")
    for name in there:
        if name not in here:
            raise ValueError(f"{where} has {short(name)}, which the model has not; {remedy}")


def check_values(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse values for a model with which it predicts nothing: nan anywhere, infinity in a weight.

    In a buffer infinity is let through: masks hold it.
    """
    weights = {
        name for name, tensor in _tensors(model, keep_vars=True).items() if isinstance(tensor, nn.Parameter)
    }
    for name, tensor in tensors.items():
        wrong = tensor[~tensor.isfinite()] if name in weights else tensor[tensor.isnan()]
        if len(wrong):
            raise ValueError(
                f"{where}: {short(name)} holds {wrong[0].item()}, with which nothing can be predicted; train "
                "it again"
            )


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """Put tensors of the right shapes into a model, which takes on their types."""
    wanted = {**tensors, **{alias: tensors[name] for alias, name in tied.items()}}
    for name, target in _tensors(model, keep_vars=True).items():
        # In place and in its own layout of memory, so that whoever holds the tensor has the new values.
        target.data = target.data.to("cpu", wanted[name].dtype)
        target.data.copy_(wanted[name])
    for alias, name in tied.items():
        _tie(model, alias, name)
    for name, tensor in _tensors(model).items():
        if not tensor.equal(wanted[name]):  # neither has a nan, which check_values refuses
            raise ValueError(
                f"{short(name)} did not keep its saved values: the network ties it to another tensor, or "
                "makes it anew; give the source as it was saved"
            )


def follow_dtype(net: nn.Module) -> None:
    """Bring what is no part of a network's state, such as the pixels' mean, to the type of what is."""
    state = _tensors(net)
    types = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    for name, buffer in net.named_buffers():
        if name not in state:
            floats = buffer.is_floating_point() and len(types) == 1
            buffer.data = buffer.data.to("cpu", next(iter(types)) if floats else buffer.dtype)


def _tensors(net: nn.Module, keep_vars: bool = False) -> dict[str, Tensor]:
    """Weights and buffers by name, without what else a module may keep in its state."""
    state = net.state_dict(keep_vars=keep_vars)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _tie(model: nn.Module, alias: str, name: str) -> None:
    """Let a module hold the very tensor of another, as it was when it was saved."""
    (owner, attribute), (other, other_attribute) = (path.rpartition(".")[::2] for path in (alias, name))
    mine, tensor = (
        getattr(model.get_submodule(owner), attribute),
        getattr(model.get_submodule(other), other_attribute),
    )
    if type(mine) is not type(tensor):
        raise ValueError(f"{alias} cannot be the tensor {name}: one is a weight, one a buffer; {COPY_AGAIN}")
    if mine is not tensor:
        setattr(model.get_submodule(owner), attribute, tensor)
