"""One model, eight threads: each gets what it would get alone, to the bit, however the model is run."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import _tiny
from ensbridge.data import ImageSet
from ensbridge.deploy.export import export, trace
from ensbridge.deploy.fuse import prepare_for_inference
from ensbridge.evaluation.predict import predict_each
from ensbridge.methods import Bridge
from ensbridge.models import TokenScore
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble

THREADS, CALLS = 8, 25
Run = Callable[[Tensor], object]


class Waits(nn.Module):
    """A layer that does nothing, but waits while `gate` is closed; what it waits with is in no copy of it."""

    gate, reached = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and threading.current_thread() is not threading.main_thread():
            self.reached.set()
            assert self.gate.wait(60)
        return x


def source(seed: int = 0) -> nn.Sequential:
    """A source whose feature "1" is changed in place by the layer behind it."""
    with _tiny.seeded(seed):
        layers = [nn.Flatten(), nn.Linear(12, 16), nn.ReLU(inplace=True), nn.Linear(16, 3)]
        return nn.Sequential(*layers).eval()


def bridge(seed: int = 1) -> Bridge:
    with _tiny.seeded(seed):
        return Bridge(TokenScore(3, 16, 8)).one_step()


def model(net: nn.Module | None = None, feature: str = "1") -> FastEnsemble:
    return FastEnsemble(net or source(), [bridge()], feature, temperature=1.3).eval()


def images(seed: int, count: int = 2) -> Tensor:
    return torch.rand(count, 3, 2, 2, generator=_tiny.generator(seed))


def leaves(answer: object) -> list[Tensor]:
    if isinstance(answer, Tensor):
        return [answer]
    assert isinstance(answer, dict | tuple)
    return list(answer.values() if isinstance(answer, dict) else answer)


def check_threads(runs: Sequence[Run], inputs: Sequence[Tensor] | None = None, warm: bool = True) -> None:
    """Each thread runs one of `runs` on images of its own, and gets to the bit what it gets alone."""
    given = [images(seed) for seed in range(THREADS)] if inputs is None else inputs
    mine = [runs[number % len(runs)] for number in range(THREADS)]
    start = threading.Barrier(THREADS)

    @torch.no_grad()
    def alone(number: int) -> list[Tensor]:
        return leaves(mine[number](given[number]))

    def together(number: int) -> list[list[Tensor]]:
        start.wait(60)
        return [alone(number) for _ in range(CALLS)]

    expected = [alone(number) for number in range(THREADS)] if warm else []
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(together, range(THREADS)))
    expected = expected or [alone(number) for number in range(THREADS)]
    for answers, right in zip(found, expected, strict=True):
        for answer in answers:
            assert all(one.equal(other) for one, other in zip(answer, right, strict=True))
    assert len({tuple(each[0].flatten().tolist()) for each in expected}) == THREADS  # or nothing was tested


@pytest.fixture
def compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# ------------------------------------------------------------------------------ predictions


def nested() -> FastEnsemble:
    """A fast ensemble whose source is one too, and whose feature is that inner one's own."""
    return model(model(), "source.1")


EAGER: dict[str, Callable[[], Run]] = {
    "call": model,
    "with_source": lambda: model().with_source,
    "inference model": lambda: prepare_for_inference(model()),
    "nested": nested,
    "member": lambda: Ensemble([model(), source(1)]),
    "predict_each": lambda: predicting({"fast": model(), "ensemble": Ensemble([source(), source(1)])}),
    "one source, two models": lambda: two_models(source()),
    "exported program": lambda: trace(prepare_for_inference(model()), images(0)).module(check_guards=False),
}


def predicting(models: dict[str, nn.Module]) -> Run:
    return lambda given: predict_each(models, ImageSet(given))


def two_models(net: nn.Module) -> Run:
    several = model(net), model(net, "3")
    return lambda given: (several[0](given), several[1].source(given))


@pytest.mark.parametrize("name", EAGER)
def test_threads_that_share_a_model(name: str) -> None:
    check_threads([EAGER[name]()])


def test_threads_that_share_a_source_or_one_of_its_modules() -> None:
    net = source()
    other = nn.Sequential(nn.Flatten(), net[1], nn.Linear(16, 3)).eval()
    check_threads([model(net), model(net, "2"), model(other), net])


def test_threads_whose_images_are_of_different_sizes() -> None:
    fast = FastEnsemble(_tiny.member(), [Bridge(_tiny.score()).one_step()], _tiny.FEATURE).eval()
    sizes = [(2, 3, 4 + number, 12 - number) for number in range(THREADS)]
    given = [torch.rand(size, generator=_tiny.generator(seed)) for seed, size in enumerate(sizes)]
    check_threads([fast], given)
    check_threads([fast.with_source, prepare_for_inference(fast)], given)


def test_an_exported_file_in_threads(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    path = export(model(), tmp_path / "model.onnx", "onnx", images(0)).path
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    check_threads([lambda given: torch.from_numpy(session.run(None, {"images": given.numpy()})[0])])


# ------------------------------------------------------------------------------ torch.compile


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("make", [model, nested], ids=["model", "nested"])
def test_threads_that_share_a_compiled_model(make: Callable[[], FastEnsemble], warm: bool) -> None:
    check_threads([torch.compile(make(), backend="aot_eager", fullgraph=True)], warm=warm)


@pytest.mark.usefixtures("compiler")
def test_threads_that_share_a_model_of_the_default_compiler() -> None:
    check_threads([torch.compile(model(), fullgraph=True)])


@pytest.mark.usefixtures("compiler")
def test_compiled_and_eager_threads_at_once() -> None:
    fast = model()
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
    both = torch.compile(fast.with_source, backend="aot_eager", fullgraph=True)
    check_threads([fast, compiled, both, fast.source, fast.with_source])
    assert _tiny.hooks_of(fast) == 0


@pytest.mark.usefixtures("compiler")
def test_a_source_that_does_not_compile_in_one_piece() -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x

    layers = [nn.Flatten(), Breaks(), source()[1], Breaks(), nn.ReLU(inplace=True), nn.Linear(16, 3)]
    check_threads([torch.compile(model(nn.Sequential(*layers).eval(), "2"), backend="aot_eager")])


# ------------------------------------------------------------------------------ copies made meanwhile


def replica(module: nn.Module) -> nn.Module:
    """A copy as DataParallel makes one for each GPU."""
    made = module._replicate_for_data_parallel()
    for name, weight in module._parameters.items():
        setattr(made, name, None if weight is None else weight.detach().clone())
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else replica(child)
    return made


def saved(fast: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda fast: pickle.loads(pickle.dumps(fast)),
    "torch.save": saved,
    "DataParallel": replica,
}


@pytest.mark.parametrize("part", ["model", "source"])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_that_is_made_while_another_thread_predicts(way: str, part: str) -> None:
    with _tiny.seeded(0):
        net = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), Waits(), nn.Linear(16, 3)).eval()
    fast, given = model(net), images(0)
    expected = fast(given)
    Waits.gate.clear()
    Waits.reached.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(fast, given)
        try:
            assert Waits.reached.wait(60)
            copied = COPIES[way](fast if part == "model" else net)
        finally:
            Waits.gate.set()
        assert answer.result().equal(expected)
    assert _tiny.hooks_of(copied) == 0
    assert (
        copied.state_dict().keys() == (fast if part == "model" else net).state_dict().keys()
        or way == "DataParallel"
    )
    again = copied if part == "model" else model(copied)
    assert again(given).equal(expected)
    assert fast(given).equal(expected)


def test_an_error_in_one_thread_leaves_the_others_alone() -> None:
    fast = model()

    def fails(given: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            fast(given.repeat(1, 2, 1, 1))
        return fast(given)

    check_threads([fast, fails])
    assert _tiny.hooks_of(fast) == 0
