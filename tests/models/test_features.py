"""A feature is what the module really computed, and reading it changes nothing about the network."""

from __future__ import annotations

import functools
import re
import threading
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import prune

import _tiny
from ensbridge.models import forward_with_features
from ensbridge.models.features import FeatureExtractor


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("broken on purpose")


@pytest.mark.parametrize("feature", ["stem", "stages.0", "stages.1.0.conv1", "head"])
def test_a_feature_is_the_modules_own_output_in_the_same_pass(feature: str) -> None:
    net, images = _tiny.member(), _tiny.images()
    outputs: list[Tensor] = []
    handle = net.get_submodule(feature).register_forward_hook(lambda *args: outputs.append(args[2]))
    logits, h = forward_with_features(net, images, feature)
    handle.remove()
    assert len(outputs) == 1
    assert h.equal(outputs[0])
    assert h.data_ptr() != outputs[0].data_ptr()  # what an in-place layer behind does is not seen
    torch.testing.assert_close(logits, net(images), rtol=0, atol=0)
    assert _tiny.hooks_of(net) == 0


@pytest.mark.parametrize("features", [(), ("head",), ("stages.1", "stem", "stages.0.0"), ("stem", "stem")])
def test_several_features_come_in_the_order_asked_for_from_one_pass(features: tuple[str, ...]) -> None:
    net, images = _tiny.member(), _tiny.images()
    expected = [net(images), *(forward_with_features(net, images, feature)[1] for feature in features)]
    calls = _tiny.count_runs([net])
    h = forward_with_features(net, images, *features)
    assert calls == {0: 1}
    extract = FeatureExtractor(net, *features)
    for found in (h, extract(images), extract(images)):
        assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("feature", ["layer9", "stages.0.7", ""])
def test_an_unknown_feature_is_refused_with_what_there_is(feature: str) -> None:
    net = _tiny.member()
    with pytest.raises(ValueError, match=re.escape(repr(feature))) as error:
        forward_with_features(net, _tiny.images(), feature)
    for name, _ in net.named_children():
        assert re.search(rf"\b{name}\b", str(error.value).split("it has:")[1])
    assert ("stages.0" in str(error.value).split("it has:")[1]) == ("." in feature)
    assert _tiny.hooks_of(net) == 0


def test_a_feature_that_runs_twice_is_refused() -> None:
    layer = nn.Linear(4, 4)
    net = nn.Sequential(nn.Flatten(), layer, layer)
    with pytest.raises(ValueError, match="'1' ran 2 times"):
        forward_with_features(net, torch.rand(2, 4), "1")
    assert _tiny.hooks_of(net) == 0


def test_a_feature_that_never_runs_is_refused() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    with pytest.raises(ValueError, match="'idle' ran 0 times"):
        forward_with_features(Idle(), torch.rand(2, 4), "idle")


def test_an_exception_inside_the_network_leaves_no_hook_behind() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Raises())
    with pytest.raises(RuntimeError, match="broken on purpose"):
        forward_with_features(net, torch.rand(2, 4), "0")
    assert _tiny.hooks_of(net) == 0


def test_two_threads_in_one_network_each_get_their_own_feature() -> None:
    class Meet(nn.Module):
        """Both threads are inside the network, hooks set, before either goes on."""

        def __init__(self) -> None:
            super().__init__()
            self.barrier = threading.Barrier(2)

        def forward(self, x: Tensor) -> Tensor:
            self.barrier.wait(timeout=30)
            return x

    net = nn.Sequential(Meet(), nn.Linear(4, 8), Meet(), nn.Linear(8, 3))

    def run(seed: int) -> None:
        generator = _tiny.generator(seed)
        for _ in range(50):
            images = torch.rand(2, 4, generator=generator)
            logits, feature = forward_with_features(net, images, "1")
            torch.testing.assert_close(feature, net[1](images), rtol=0, atol=0)
            torch.testing.assert_close(logits, net[3](feature), rtol=0, atol=0)

    with ThreadPoolExecutor(2) as pool:
        for outcome in [pool.submit(run, seed) for seed in (0, 1)]:
            outcome.result()
    assert _tiny.hooks_of(net) == 0


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("what", ["function", "network"])
def test_features_are_read_in_compiled_code(what: str) -> None:
    torch.compiler.reset()
    with _tiny.seeded(0):
        net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.SiLU(), nn.Linear(8, 3))
    call = forward_with_features
    if what == "function":
        call = torch.compile(forward_with_features, backend="eager")
    else:
        net.compile(backend="eager")
    for seed in range(3):
        images = torch.rand(2, 3, 2, 2, generator=_tiny.generator(seed))
        logits, feature = call(net, images, "1")
        torch.testing.assert_close(feature, net[1](images.flatten(1)))
        torch.testing.assert_close(logits, net[3](net[2](feature)))
    assert _tiny.hooks_of(net) == 0
    torch.compiler.reset()


def test_a_feature_extractor_is_one_compiled_graph_and_leaves_no_hook() -> None:
    torch.compiler.reset()
    with _tiny.seeded(0):
        net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.SiLU(), nn.Linear(8, 3))
    extract = FeatureExtractor(net, "1")
    graphs = CompileCounter()
    compiled = torch.compile(extract, backend=graphs, fullgraph=True)
    for seed in range(3):
        images = torch.rand(2, 3, 2, 2, generator=_tiny.generator(seed))
        logits, feature = net(images), net[1](images.flatten(1))
        for call in (extract, compiled):
            found = call(images)
            torch.testing.assert_close(found[0], logits)
            torch.testing.assert_close(found[1], feature)
    assert graphs.frame_count == 1
    assert _tiny.hooks_of(net) == 0
    torch.compiler.reset()


def test_an_in_place_layer_behind_the_feature_does_not_change_it() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(3))
    images = _tiny.images(4) - 0.5  # of both signs, and so is what a convolution without bias makes of them
    net(images)
    _, h = forward_with_features(net, images, "0")
    assert h.equal(net[0](images))
    assert h.min() < 0 < h.max()


def test_a_layer_that_returns_a_tuple_is_read_at_its_first() -> None:
    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            return super().forward(input), None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = Layer(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x)[0])

    logits, features = forward_with_features(Net(), torch.rand(5, 4), "layer")
    assert (logits.shape, features.shape) == ((5, 3), (5, 8))


# What was done to the network is honoured


def chain(seed: int = 0) -> nn.Sequential:
    with _tiny.seeded(seed):
        body = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8))
        return nn.Sequential(body, nn.ReLU(inplace=True), nn.Linear(8, 3)).eval()


def shrink(net: nn.Sequential) -> None:
    net[0][1] = nn.utils.skip_init(nn.Linear, 12, 8)  # type: ignore[index,operator]
    nn.init.constant_(net[0][1].weight, 0.1)  # type: ignore[index,arg-type]
    nn.init.zeros_(net[0][1].bias)  # type: ignore[index,arg-type]


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "weights in place": lambda net: net[2].weight.data.mul_(3),
    "weights assigned": lambda net: net.load_state_dict(_tiny.state(chain(1)), assign=True),
    "double precision": lambda net: net.double(),
    "training": lambda net: net.train(),
    "another layer": shrink,
    "another activation": lambda net: net.__setitem__(1, nn.SiLU()),
    "another body": lambda net: net.__setitem__(0, chain(1)[0]),
    "tied weights": lambda net: setattr(net[2], "weight", nn.Parameter(net[0][1].weight[:3, :8].detach())),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_done_to_the_network_is_honoured(change: str, compiled: bool) -> None:
    torch.compiler.reset()
    net, images = chain(), _tiny.images()[:, :, :2, :2]
    call = FeatureExtractor(net, "0")
    call = torch.compile(call, backend="eager", fullgraph=True) if compiled else call
    call(images)
    CHANGES[change](net)
    images = images.to(net[2].weight.dtype)
    net.zero_grad()
    twin = chain()
    twin.load_state_dict(net.state_dict())
    logits, h = call(images)
    logits.sum().backward()
    assert net[0][1].weight.grad is not None  # type: ignore[index]
    moved = _tiny.state(net)
    net.load_state_dict(twin.to(images.dtype).state_dict())
    expected = net[0](images)
    torch.testing.assert_close(h, expected)
    torch.testing.assert_close(logits, net[2](net[1](expected)))
    assert _tiny.same(moved, net.state_dict())  # what training mode does to buffers, too
    torch.compiler.reset()


def test_a_pruned_layer_and_a_users_hook_are_part_of_the_feature() -> None:
    net, images = chain(), _tiny.images()[:, :, :2, :2]
    prune.l1_unstructured(net[0][1], "weight", 0.5)  # type: ignore[index,arg-type]
    net[0][1].weight_orig.data.mul_(3)  # type: ignore[index,union-attr]
    net[0].register_forward_hook(lambda _module, _inputs, output: output + 1)
    logits, h = forward_with_features(net, images, "0")
    expected = net[0](images)
    assert h.equal(expected)
    assert logits.equal(net[2](net[1](expected)))
    assert _tiny.hooks_of(net) == 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bind", [types.MethodType, functools.partial])
def test_a_replaced_forward_is_run_and_holds_no_feature_back(
    bind: Callable[..., object], compiled: bool
) -> None:
    def forward(self: nn.Module, images: Tensor) -> Tensor:
        return 2 * self[1](self[0](images))  # type: ignore[index,operator]

    torch.compiler.reset()
    net, images = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), torch.rand(2, 4)
    net.forward = bind(forward, net)
    call = FeatureExtractor(net, "0")
    logits, h = (torch.compile(call, backend="eager", fullgraph=True) if compiled else call)(images)
    assert h.equal(net[0](images))
    assert logits.equal(net(images))
    alive = weakref.ref(h)
    del h
    assert alive() is None
    torch.compiler.reset()


# Calls inside calls


def test_a_feature_of_a_network_that_reads_features_itself() -> None:
    class Reads(nn.Module):
        """A network that reads a feature of what it contains, as a FastEnsemble does."""

        def __init__(self, net: nn.Module, feature: str) -> None:
            super().__init__()
            self.net, self.feature = net, feature

        def forward(self, images: Tensor) -> Tensor:
            logits, h = forward_with_features(self.net, images, self.feature)
            return logits + h.mean(-1, keepdim=True)

    net, images = chain(), _tiny.images()[:, :, :2, :2]
    expected = net[0](images)
    inner = Reads(net, "0")
    for outer, feature in ((inner, "net.0"), (Reads(inner, "net.0"), "net.net.0"), (inner, "net")):
        logits, h = forward_with_features(outer, images, feature)
        assert h.equal(expected if feature.endswith("0") else net(images))
        assert logits.equal(outer(images))
    assert _tiny.hooks_of(net) == 0


def test_a_network_that_is_called_again_within_its_own_pass() -> None:
    net, images = chain(), _tiny.images()[:, :, :2, :2]
    inside: list[tuple[Tensor, ...]] = []

    def again(_module: nn.Module, _inputs: object, _output: object) -> None:
        if not inside:
            inside.append(())
            inside.append(forward_with_features(net, 1 - images, "0"))

    handle = net[1].register_forward_hook(again)
    outer = forward_with_features(net, images, "0")
    handle.remove()
    for found, given in ((outer, images), (inside[1], 1 - images)):
        assert all(a.equal(b) for a, b in zip(found, forward_with_features(net, given, "0"), strict=True))
