"""What a network costs: its parameters and its multiply-accumulate operations (MACs)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ensbridge.utils.devices import modes_kept
from ensbridge.utils.inputs import to_network, unpack


def count_params(module: nn.Module) -> int:
    """The number of parameters of a module, each shared one counted once.

    >>> count_params(nn.Linear(4, 3))
    15
    """
    return sum(parameter.numel() for parameter in module.parameters())


def count_macs(module: nn.Module, *inputs: Any, convs_only: bool = False) -> int:
    """The multiply-accumulates of `module(*inputs)` in eval mode, for the whole batch given.

    Inputs that come as one mapping are given by name; all are brought to where the module is.

    Convolutions, linear and recurrent layers, matrix products and attention count; additions of a bias,
    normalisation and other elementwise work do not. `convs_only` leaves only the convolutions. The module,
    its buffers and the random state are afterwards as they were before.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, kernel_size=3, padding=1), nn.Flatten(), nn.Linear(8 * 4 * 4, 10))
    >>> image = torch.rand(1, 3, 4, 4)
    >>> count_macs(net, image), count_macs(net, image, convs_only=True)
    (4736, 3456)
    """
    arguments, named = unpack(to_network(inputs[0] if len(inputs) == 1 else inputs, module))
    counter = FlopCounterMode(display=False, custom_mapping=_MORE_PRODUCTS)
    with _untouched(module, inputs) as buffers, without_fused_kernels(module), torch.no_grad(), counter:
        functional_call(module, buffers, arguments, named)
    flops = counter.get_flop_counts().get("Global", {})
    return sum(count for op, count in flops.items() if not convs_only or "conv" in str(op)) // 2


@contextmanager
def _untouched(module: nn.Module, inputs: tuple[Any, ...]) -> Iterator[dict[str, Tensor]]:
    """Eval mode, with copies of the buffers to run on; training flags and random state return on leaving."""
    given = (tensor for tensor in inputs if isinstance(tensor, Tensor))
    tensors = [*module.parameters(), *module.buffers(), *given]
    gpus = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
    with modes_kept([module]), torch.random.fork_rng(devices=gpus):
        # Flags are set one by one: a module may override train(), say to keep frozen parts in eval mode.
        for part in module.modules():
            part.training = False
        yield {name: buffer.clone() for name, buffer in module.named_buffers()}


@contextmanager
def without_fused_kernels(module: nn.Module) -> Iterator[None]:
    """Attention and recurrent layers as plain matrix products: the counter sees nothing of fused kernels.

    >>> lstm = nn.LSTM(2, 3)
    >>> with without_fused_kernels(lstm), FlopCounterMode(display=False) as counter:
    ...     _ = lstm(torch.rand(1, 1, 2))
    >>> counter.get_total_flops() // 2
    60
    """
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    mkldnn = torch.backends.mkldnn.enabled  # its `flags` has other arguments in other versions
    torch.backends.mkldnn.enabled = False
    # On a GPU convolutions keep their kernels, which are counted, unless there are recurrent layers as well.
    recurrent = any(isinstance(part, nn.RNNBase) for part in module.modules())
    cudnn = torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()
    try:
        with sdpa_kernel(SDPBackend.MATH), cudnn:
            yield
    finally:
        torch.backends.mkldnn.enabled = mkldnn
        torch.backends.mha.set_fastpath_enabled(fastpath)


# Products that torch's counter leaves out: the FLOPs by the shapes of their arguments.
_MORE_PRODUCTS = {
    torch.ops.aten.dot: lambda a, *_, **__: 2 * a.numel(),  # a multiply-accumulate for each element of a
    torch.ops.aten.mv: lambda a, *_, **__: 2 * a.numel(),
    torch.ops.aten.addmv: lambda _bias, a, *_, **__: 2 * a.numel(),
    torch.ops.aten.addbmm: lambda _bias, a, b, *_, **__: 2 * a.numel() * b[-1],
}
