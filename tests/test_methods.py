"""The methods: each loss against a computation by hand, and what training may and may not touch."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import _tiny
import ensbridge as eb
from ensbridge.ensemble import Ensemble
from ensbridge.fast_ensemble import FastEnsemble
from ensbridge.methods import (
    AbstractMethod,
    Batch,
    Bridge,
    BridgeConfig,
    DeepEnsemble,
    DiffusionBridge,
    EmaRule,
    StepDistillation,
    Together,
)
from ensbridge.methods.step_distillation import halved
from ensbridge.nets import run_tapped
from ensbridge.sampler import walk
from ensbridge.schedule import TemperatureLaw

CONSTANT = TemperatureLaw(2.0, spread=0.0)  # nothing random about the temperature
FEW_STEPS = eb.FitConfig(epochs=1, batch_size=6, lr=1e-2)  # 4 steps on _tiny.data()


def bridge_to(ensemble: Ensemble, seed: int = 0, **arguments: Any) -> DiffusionBridge:
    """A bridge with a tiny score network of its own."""
    config = arguments.get("config", BridgeConfig())
    return DiffusionBridge(ensemble, _tiny.score(config.z_input, seed), _tiny.FEATURE, **arguments)


def batch(seed: int = 0, labels: Tensor | None = None) -> Batch:
    return Batch(_tiny.images(), labels, _tiny.generator(seed))


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(tensor.equal(other[name]) for name, tensor in one.items())


@pytest.fixture
def ensemble() -> Ensemble:
    return _tiny.ensemble(3)


# The bridge's losses


@pytest.mark.parametrize("preset", ["default", "paper", "released"])
@pytest.mark.parametrize("beta", [1e-4, 0.5])
def test_the_loss_is_beta_times_the_papers(ensemble: Ensemble, preset: Any, beta: float) -> None:
    """Draws are made in the order temperature, time, noise."""
    config = replace(BridgeConfig.preset(preset), beta=beta)
    method = bridge_to(ensemble, config=config)
    found = method.loss(batch(3))

    draws, seen = _tiny.generator(3), ensemble.observe(_tiny.images(), _tiny.FEATURE)
    rows = 1 if preset == "released" else 6
    z1 = seen.logits[0] / config.temperature.sample((rows, 1), draws)
    if preset == "default":
        z1 = z1 - z1.mean(-1, keepdim=True)
    log_mean = seen.logits.softmax(-1).mean(0).log()
    z0 = log_mean - log_mean.mean(-1, keepdim=True)
    if preset == "paper":
        t = 1 - torch.rand(6, generator=draws)
    else:
        t = torch.randint(1, 6 if preset == "default" else 5, (6,), generator=draws) / 5
    sample = config.schedule.sample(z0, z1, t, draws)
    epsilon = method.bridge.score(seen.feature, sample.z_t, t) / math.sqrt(beta)
    target = (sample.z_t - z0) / (beta * t).sqrt()[:, None]
    papers = sum((epsilon[b] - target[b]).square().sum() for b in range(6)) / 6
    torch.testing.assert_close(found, beta * papers, rtol=1e-4, atol=0)
    torch.testing.assert_close(method.bridge.epsilon(seen.feature, sample.z_t, t), epsilon)


def test_the_loss_of_a_perfect_score_is_zero(ensemble: Ensemble) -> None:
    class Perfect(nn.Module):
        """Knows the images and so the ensemble's answer."""

        def forward(self, h: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
            return (z_t - ensemble(_tiny.images())) / t.sqrt()[:, None]

    for loss in ("bridge", "kl"):
        method = DiffusionBridge(ensemble, Perfect(), _tiny.FEATURE, loss=loss)
        assert method.loss(batch()).item() == pytest.approx(0, abs=1e-9)
        truth = ensemble(_tiny.images()).log_softmax(-1)
        torch.testing.assert_close(method.log_probs(_tiny.images()), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", [None, (0,), (1, 2)])
def test_the_kl_loss_is_the_mean_relative_entropy(ensemble: Ensemble, target: tuple[int, ...] | None) -> None:
    method = bridge_to(ensemble, loss="kl", target=target, config=BridgeConfig(temperature=CONSTANT))
    seen = ensemble.observe(_tiny.images(), _tiny.FEATURE)
    logits = seen.logits.double().numpy()
    p = scipy.special.softmax(logits[list(target or (0, 1, 2))], axis=-1).mean(0)
    z1 = logits[0] / 2 - logits[0].mean(-1, keepdims=True) / 2
    residual = method.bridge.score(seen.feature, torch.from_numpy(z1).float(), torch.ones(6))
    q = scipy.special.softmax(z1 - residual.detach().double().numpy(), axis=-1)
    expected = scipy.special.rel_entr(p, q).sum(-1).mean()
    assert expected > 1e-3
    assert method.loss(batch()).item() == pytest.approx(expected, rel=1e-3)
    assert method.bridge.times == (0.0, 1.0)


def test_a_target_of_the_source_alone_is_its_centred_logit(ensemble: Ensemble) -> None:
    z0, _, seen = bridge_to(ensemble, target=(0,)).ends(batch())
    expected = seen.logits[0] - seen.logits[0].mean(-1, keepdim=True)
    torch.testing.assert_close(z0, expected, rtol=1e-5, atol=1e-6)


def test_a_target_names_members_by_index(ensemble: Ensemble) -> None:
    z0, _, seen = bridge_to(ensemble, target=(2, 1)).ends(batch())
    torch.testing.assert_close(z0.softmax(-1), seen.logits[1:].softmax(-1).mean(0))
    assert bridge_to(ensemble).target == (0, 1, 2)


@pytest.mark.parametrize("loss", ["bridge", "kl"])
def test_labels_are_never_used(ensemble: Ensemble, loss: Any) -> None:
    nonsense = torch.full((6,), -7)
    method = bridge_to(ensemble, loss=loss)
    assert method.loss(batch(1)).equal(method.loss(batch(1, nonsense)))
    ends = []
    for data in (_tiny.data(), _tiny.data().without_labels()):
        method = bridge_to(ensemble, loss=loss)
        eb.fit(method, data, FEW_STEPS)
        ends.append(weights(method.student))
    assert same(*ends)


# Times and temperatures


@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("rule", ["grid", "released"])
def test_training_times_are_drawn_evenly_from_their_grid(ensemble: Ensemble, rule: Any, steps: int) -> None:
    method = bridge_to(ensemble, config=BridgeConfig(train_times=rule, num_steps=steps))
    counts = Counter(method.draw_times(3000, torch.device("cpu"), _tiny.generator()).tolist())
    last = steps if rule == "grid" else steps - 1
    assert sorted(counts) == [torch.tensor(n / steps).item() for n in range(1, last + 1)]
    assert last == 1 or scipy.stats.chisquare(list(counts.values())).pvalue > 0.001


def test_uniform_training_times_fill_the_half_open_interval(ensemble: Ensemble) -> None:
    method = bridge_to(ensemble, config=BridgeConfig(train_times="uniform"))
    t = method.draw_times(20_000, torch.device("cpu"), _tiny.generator())
    assert t.min() > 0
    assert t.max() <= 1
    assert scipy.stats.kstest(t.numpy(), "uniform").pvalue > 0.01


def test_no_uniform_time_is_zero_even_when_the_draw_is(
    ensemble: Ensemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = bridge_to(ensemble, config=BridgeConfig(train_times="uniform"))
    monkeypatch.setattr(torch, "rand", lambda count, **_: torch.zeros(count))
    assert method.draw_times(3, torch.device("cpu"), None).eq(1).all()


def temperatures_of(z1: Tensor, logits: Tensor) -> Tensor:
    """T of each image, from differences of logits, which no centring changes."""
    ratios = (logits[:, 1:] - logits[:, :1]) / (z1[:, 1:] - z1[:, :1])
    torch.testing.assert_close(ratios[:, 0], ratios[:, 1], rtol=1e-3, atol=0)
    return ratios[:, 0]


@pytest.mark.parametrize(("draw", "different"), [("image", 6), ("batch", 1)])
def test_training_temperatures_are_drawn_per_image_or_per_batch(
    ensemble: Ensemble, draw: Any, different: int
) -> None:
    method = bridge_to(ensemble, config=BridgeConfig(temperature_draw=draw))
    _, z1, seen = method.ends(batch(1))
    found = temperatures_of(z1, seen.logits[0])
    assert len({round(t, 3) for t in found.tolist()}) == different
    expected = TemperatureLaw().sample((different,), _tiny.generator(1)).expand(6)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


def test_the_test_temperature_is_the_mean_or_drawn(ensemble: Ensemble) -> None:
    logits, h = run_tapped(ensemble.source, _tiny.FEATURE, _tiny.images())
    mean = Bridge(_tiny.score()).path(h, logits)[0]
    torch.testing.assert_close(
        temperatures_of(mean, logits), torch.full((6,), 2 + 0.4 / 6), rtol=1e-4, atol=0
    )
    drawn = Bridge(_tiny.score(), BridgeConfig(test_temperature="drawn"))
    found = temperatures_of(drawn.path(h, logits)[0], logits)
    assert 2 * (1 - 1e-4) < found.min() < found.max() < 2.4 * (1 + 1e-4)
    assert len({round(t, 3) for t in found.tolist()}) > 3
    assert drawn.path(h, logits)[0].equal(drawn.path(h, logits)[0])
    other = drawn.path(h, logits, _tiny.generator(5))
    assert not other[0].equal(drawn.path(h, logits)[0])
    assert other[-1].equal(drawn.path(h, logits, _tiny.generator(5))[-1])


def test_the_start_is_centred_unless_told_otherwise() -> None:
    logits = _tiny.logits()
    plain = Bridge(_tiny.score(), BridgeConfig(centre=False)).start(logits, 2.0)
    torch.testing.assert_close(plain, logits / 2)
    centred = Bridge(_tiny.score()).start(logits, 2.0)
    assert centred.sum(-1).abs().max() < 1e-13
    torch.testing.assert_close(centred.softmax(-1), plain.softmax(-1))


# The bridge in use


def test_one_step_is_the_start_less_the_networks_output(ensemble: Ensemble) -> None:
    """Z_0 = Z_1 - sigma_1·ε(h, Z_1, 1), and the network's own output is √beta·ε."""
    logits, h = run_tapped(ensemble.source, _tiny.FEATURE, _tiny.images())
    for beta in (1e-4, 1.0):
        bridge = Bridge(_tiny.score(), BridgeConfig(beta=beta)).one_step()
        z1 = bridge.start(logits, TemperatureLaw().mean)
        expected = z1 - bridge.score(h, z1, torch.ones(6))
        torch.testing.assert_close(bridge(h, logits), expected, rtol=1e-4, atol=1e-5)


def test_a_prediction_walks_the_bridges_own_times(ensemble: Ensemble) -> None:
    logits, h = run_tapped(ensemble.source, _tiny.FEATURE, _tiny.images())
    bridge = Bridge(_tiny.score("informative"), BridgeConfig(z_input="informative"))
    assert bridge.times == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert (bridge.steps, bridge.on_times((0, 0.2, 1)).steps, bridge.one_step().steps) == (5, 2, 1)
    for times in (None, (0.0, 0.3, 1.0)):
        other = bridge if times is None else bridge.on_times(times)
        z1 = bridge.start(logits, TemperatureLaw().mean)
        expected = walk(bridge.epsilon, bridge.schedule, z1, h, times, noise=False)[-1]
        torch.testing.assert_close(other(h, logits), expected)


def test_without_a_generator_a_prediction_is_deterministic_and_with_one_it_is_noisy(
    ensemble: Ensemble,
) -> None:
    logits, h = run_tapped(ensemble.source, _tiny.FEATURE, _tiny.images())
    bridge = Bridge(_tiny.score(), BridgeConfig(beta=1.0, variance="released"))
    assert bridge(h, logits).equal(bridge(h, logits))
    noisy = [bridge(h, logits, _tiny.generator(seed)) for seed in (1, 1, 2)]
    assert noisy[0].equal(noisy[1])
    assert not noisy[0].equal(noisy[2])
    assert (noisy[0] - bridge(h, logits)).abs().max() > 0.05


def test_a_copy_on_other_times_has_the_same_weights_and_none_in_common() -> None:
    bridge = Bridge(_tiny.score())
    other = bridge.one_step()
    assert same(weights(bridge), weights(other))
    nn.init.ones_(other.score.head.bias)
    assert bridge.score.head.bias.ne(1).all()


def test_the_methods_prediction_is_the_sources_logits_through_the_bridge(ensemble: Ensemble) -> None:
    method = bridge_to(ensemble)
    logits, h = run_tapped(ensemble.source, _tiny.FEATURE, _tiny.images())
    expected = F.log_softmax(method.bridge(h, logits), -1)
    found = method.log_probs(_tiny.images())
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(6))


# Presets


def test_presets_are_the_specified_ones_cell_by_cell() -> None:
    rows = {
        "train_times": ("grid", "uniform", "released"),
        "temperature_draw": ("image", "image", "batch"),
        "test_temperature": ("mean", "drawn", "mean"),
        "centre": (True, False, False),
        "z_input": ("none", "paper", "dead"),
        "variance": ("exact", "exact", "released"),
        "ema": (0.99995, 0.99995, 0.99995),
        "ema_warmup": (True, False, True),
        "ema_swapped": (False, False, True),
        "distillation": ("direct", "progressive", "direct"),
        "beta": (1e-4,) * 3,
        "num_steps": (5,) * 3,
        "temperature": ({"base": 2.0, "spread": 0.2, "concentration": 5.0},) * 3,
    }
    for column, name in enumerate(("default", "paper", "released")):
        assert asdict(BridgeConfig.preset(name)) == {row: cells[column] for row, cells in rows.items()}
    assert BridgeConfig.preset("default") == BridgeConfig()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"beta": -1.0}, "beta is -1.0"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"variance": "none"}, "'none'"),
        ({"ema": 1.0}, "EMA decay is 1.0"),
        ({"train_times": "released", "num_steps": 1}, "num_steps is 1"),
        ({"train_times": "grids"}, "train_times is 'grids'"),
        ({"temperature_draw": "images"}, "temperature_draw is 'images'"),
        ({"test_temperature": "draw"}, "test_temperature is 'draw'"),
        ({"z_input": "zed"}, "z_input is 'zed'"),
        ({"distillation": "halving"}, "distillation is 'halving'"),
    ],
)
def test_a_bad_configuration_is_refused_with_its_value(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        BridgeConfig(**arguments)


def test_an_unknown_preset_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'fast'.*default, paper, released"):
        BridgeConfig.preset("fast")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"loss": "mse"}, "loss is 'mse'"),
        ({"target": ()}, "target is ()"),
        ({"target": (0, 3)}, "target is (0, 3); it must name members 0 to 2"),
        ({"target": (-1,)}, "target is (-1,)"),
        ({"feature": "layer9"}, "'layer9'"),
        ({"config": BridgeConfig(z_input="dead")}, "'none', the configuration says 'dead'"),
    ],
)
def test_a_bad_bridge_is_refused_with_its_value(
    ensemble: Ensemble, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        DiffusionBridge(ensemble, _tiny.score("none"), **{"feature": _tiny.FEATURE, **arguments})


# The average of the weights


class Climber(AbstractMethod):
    """One weight from 0 that plain SGD raises by the learning rate at each step."""

    def __init__(self, rule: EmaRule) -> None:
        self.student = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.student.weight)
        self.ema = rule

    def loss(self, batch: Batch) -> Tensor:
        return -self.student.weight.sum()

    def log_probs(self, images: Tensor) -> Tensor:
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.99995])
def test_the_average_keeps_the_old_and_the_swapped_one_the_new(
    decay: float, warmup: bool, swapped: bool
) -> None:
    steps, config = 12, eb.FitConfig(epochs=3, batch_size=6, lr=1.0, optimizer="sgd", momentum=0.0)
    method = Climber(EmaRule(decay, warmup, swapped))
    eb.fit(method, _tiny.data(), config)
    weight = average = 0.0
    for step in range(steps):
        weight += config.lr_at(step, steps)
        right = min(decay, (1 + step) / (10 + step)) if warmup else decay
        kept = 1 - decay if swapped else right
        average = kept * average + (1 - kept) * weight
    assert method.student.weight.item() == pytest.approx(average, rel=1e-5)
    # The swapped average at the paper's decay is the weight itself but for a hair.
    assert (average == pytest.approx(weight, rel=1e-4)) == (
        (decay, swapped) in ((0.0, False), (0.99995, True))
    )


def test_early_on_the_average_forgets_its_start() -> None:
    rule = EmaRule(0.99995)
    assert [rule.keep(step) for step in (0, 1, 90)] == pytest.approx([0.1, 2 / 11, 0.91])
    assert rule.keep(10**7) == 0.99995


def test_a_bridge_follows_its_configurations_rule(ensemble: Ensemble) -> None:
    config = replace(BridgeConfig(), ema=0.5, ema_swapped=True)
    assert bridge_to(ensemble, config=config).ema == EmaRule(0.5, swapped=True)
    with pytest.raises(ValueError, match=r"-0\.1"):
        EmaRule(-0.1)


# Training


def count_runs(ensemble: Ensemble) -> Counter[int]:
    calls: Counter[int] = Counter()
    for index, member in enumerate(ensemble.members):
        member.register_forward_hook(lambda *_, index=index: calls.update([index]))
    return calls


def test_methods_trained_together_share_one_pass_of_their_teachers(ensemble: Ensemble) -> None:
    calls = count_runs(ensemble)
    several = {
        "kl": bridge_to(ensemble, 0, loss="kl"),
        "bridge": bridge_to(ensemble, 1),
        "control": bridge_to(ensemble, 2, target=(0,)),
    }
    several["distilled"] = StepDistillation(several["bridge"])
    total = Together(several).loss(batch())
    assert calls == {0: 1, 1: 1, 2: 1}
    assert total.ndim == 0


def test_the_loss_together_is_the_sum(ensemble: Ensemble) -> None:
    config = BridgeConfig(temperature=CONSTANT)
    several = {str(seed): bridge_to(ensemble, seed, loss="kl", config=config) for seed in range(3)}
    each = [method.loss(batch()) for method in several.values()]
    torch.testing.assert_close(Together(several).loss(batch()), each[0] + each[1] + each[2])


def test_training_together_gives_what_training_alone_gives(ensemble: Ensemble) -> None:
    config = BridgeConfig(temperature=CONSTANT)

    def two() -> dict[str, DiffusionBridge]:
        control = bridge_to(ensemble, 2, loss="kl", config=config, target=(0,))
        return {"bridge": bridge_to(ensemble, 1, loss="kl", config=config), "control": control}

    together, alone = two(), two()
    start = {name: weights(method.student) for name, method in together.items()}
    eb.fit(Together(together), _tiny.data(), FEW_STEPS)
    for name, method in alone.items():
        eb.fit(method, _tiny.data(), FEW_STEPS)
        assert not same(weights(method.student), start[name])
        for key, tensor in method.student.state_dict().items():
            torch.testing.assert_close(together[name].student.state_dict()[key], tensor, rtol=1e-6, atol=1e-7)


def test_together_needs_one_rule_of_averaging_and_makes_no_prediction(ensemble: Ensemble) -> None:
    one, other = bridge_to(ensemble), bridge_to(ensemble, config=BridgeConfig(ema=0.5))
    with pytest.raises(ValueError, match="one, other"):
        Together({"one": one, "other": other})
    with pytest.raises(TypeError, match="one, two"):
        Together({"one": one, "two": bridge_to(ensemble)}).log_probs(_tiny.images())
    with pytest.raises(ValueError, match="one EMA rule"):
        Together({"one": one, "members": DeepEnsemble([_tiny.member()])})


@pytest.mark.parametrize("mode", ["direct", "progressive"])
def test_no_gradient_reaches_a_students_teacher(ensemble: Ensemble, mode: Any) -> None:
    method = StepDistillation(bridge_to(ensemble), mode=mode)
    method.loss(batch()).backward()
    assert all(parameter.grad is None for parameter in method.teacher.bridge.parameters())
    assert any(parameter.grad is not None for parameter in method.student.parameters())


@pytest.mark.parametrize("kind", ["bridge", "kl", "direct", "progressive"])
def test_training_never_touches_the_members(kind: Any) -> None:
    members = [_tiny.batch_norm_member(0), _tiny.member(1), _tiny.batch_norm_member(2)]
    ensemble = Ensemble(members).train()  # as a user may have left it
    before = weights(ensemble)
    loss = "kl" if kind == "kl" else "bridge"
    method = DiffusionBridge(ensemble, _tiny.score(), "0", loss=loss)
    trained: Any = method
    if kind in ("direct", "progressive"):
        trained = StepDistillation(method, (0.0, 1.0), mode=kind)
    trained.loss(batch()).backward()
    assert all(parameter.grad is None for parameter in ensemble.parameters())
    student = weights(trained.student)
    eb.fit(trained, _tiny.data(), FEW_STEPS)
    method.log_probs(_tiny.images())
    assert same(weights(ensemble), before)
    assert not same(weights(trained.student), student)
    assert not {id(p) for p in trained.student.parameters()} & {id(p) for p in ensemble.parameters()}


def test_a_batch_remembers_each_ensemble_and_feature_apart(ensemble: Ensemble) -> None:
    one, other = batch(), _tiny.ensemble(2, seed=5)
    first = one.observe(ensemble, "stem")
    assert one.observe(ensemble, "stem") is first
    assert one.observe(ensemble, "head").feature.shape != first.feature.shape
    assert one.observe(other, "stem").logits.shape[0] == 2
    assert batch().observe(ensemble, "stem") is not first


def test_a_method_names_what_its_loss_observes_and_the_networks_that_it_trains(ensemble: Ensemble) -> None:
    one, other = bridge_to(ensemble), bridge_to(ensemble, 1)
    elsewhere = DiffusionBridge(ensemble, _tiny.score(), "stem")
    assert list(one.teachers()) == [(ensemble, _tiny.FEATURE)]
    assert list(StepDistillation(one).teachers()) == [(ensemble, _tiny.FEATURE)]
    together = Together({"one": one, "other": other, "elsewhere": elsewhere})
    assert list(together.teachers()) == [(ensemble, _tiny.FEATURE), (ensemble, "stem")]
    assert list(DeepEnsemble([_tiny.member()]).teachers()) == []
    for method in (one, StepDistillation(one), together, DeepEnsemble([_tiny.member()])):
        inside = {id(p) for network in method.networks() for p in network.parameters()}
        assert inside == {id(p) for p in method.student.parameters()}


def test_a_given_observer_takes_the_ensembles_place(ensemble: Ensemble) -> None:
    calls, seen = count_runs(ensemble), ensemble.observe(_tiny.images(), _tiny.FEATURE)
    calls.clear()
    method = bridge_to(ensemble, loss="kl", config=BridgeConfig(temperature=CONSTANT))
    observers = {(ensemble, _tiny.FEATURE): lambda images: seen}
    found = method.loss(Batch(_tiny.images(), None, observers=observers))
    assert not calls
    assert found.equal(method.loss(batch()))


# Step distillation


def test_halving_five_steps_goes_by_three_and_two_to_one() -> None:
    grid = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    stages = [halved(grid), halved(halved(grid)), halved(halved(halved(grid)))]
    assert stages == [(0.0, 0.2, 0.6, 1.0), (0.0, 0.2, 1.0), (0.0, 1.0)]


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 8, 10])
def test_halving_keeps_both_ends_and_half_of_the_steps(steps: int) -> None:
    grid = tuple(n / steps for n in range(steps + 1))
    half = halved(grid)
    assert (half[0], half[-1], len(half) - 1) == (0, 1, math.ceil(steps / 2))
    assert set(half) <= set(grid)
    assert list(half) == sorted(half)


def distillation(ensemble: Ensemble, **arguments: Any) -> StepDistillation:
    """A student whose weights are no longer its teacher's."""
    teacher = bridge_to(ensemble, config=BridgeConfig(beta=0.3))
    method = StepDistillation(teacher, **arguments)
    nn.init.ones_(method.student.score.head.bias)
    return method


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_the_direct_loss_mixes_the_teachers_sample_with_the_truth(ensemble: Ensemble, weight: float) -> None:
    """Draws are made in the order temperature, teacher's walk; √beta·ε of one step is Z_1 - Z_0."""
    method = distillation(ensemble, weight=weight)
    found = method.loss(batch(4))
    teacher, draws = method.teacher.bridge, _tiny.generator(4)
    seen = ensemble.observe(_tiny.images(), _tiny.FEATURE)
    z1 = seen.logits[0] / TemperatureLaw().sample((6, 1), draws)
    z1 = z1 - z1.mean(-1, keepdim=True)
    sampled = walk(teacher.epsilon, teacher.schedule, z1, seen.feature, generator=draws)[-1]
    residual = method.student.score(seen.feature, z1, torch.ones(6))
    errors = [(residual - (z1 - z0)).square().sum(-1).mean() for z0 in (sampled, ensemble(_tiny.images()))]
    torch.testing.assert_close(found, weight * errors[0] + (1 - weight) * errors[1], rtol=1e-4, atol=0)
    assert (errors[0] - errors[1]).abs() > 1e-2


def test_the_weights_extremes_are_the_teacher_alone_and_the_truth_alone(ensemble: Ensemble) -> None:
    def losses(weight: float) -> tuple[float, float]:
        """Before and after the teacher has changed."""
        method = distillation(ensemble, weight=weight)
        first = method.loss(batch(4)).item()
        nn.init.constant_(method.teacher.bridge.score.head.bias, 9.0)
        return first, method.loss(batch(4)).item()

    before, after = losses(0.0)
    assert before == after
    before, after = losses(1.0)
    assert before != after
    # And the truth changes nothing at weight 1: another target, the same loss.
    alone = distillation(ensemble, weight=1.0)
    found = alone.loss(batch(4)).item()
    alone.teacher.target = (1,)
    assert alone.loss(batch(4)).item() == found


class Probe(nn.Module):
    """A score that answers a constant and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = torch.zeros(3)
        self.asked: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, h: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
        self.asked.append((h, z_t, t))
        return self.answer.to(z_t.dtype).expand_as(z_t)


@pytest.mark.parametrize("times", [(0.0, 0.2, 0.6, 1.0), (0.0, 0.2, 1.0), (0.0, 1.0)])
def test_a_progressive_target_lands_where_the_teacher_lands(times: tuple[float, ...]) -> None:
    """The loss ‖r - target‖² tells its target when r is 0 and each unit vector in turn."""
    ensemble = _tiny.ensemble(3).double()
    config = BridgeConfig(beta=0.3, z_input="informative", temperature=CONSTANT)
    teacher = bridge_to(ensemble, config=config)
    teacher.bridge.double()
    method = StepDistillation(teacher, times, mode="progressive")
    method.student.score = probe = Probe()
    image = _tiny.images(1).double()
    steps_seen = set()
    for seed in range(4 * len(times[1:])):

        def loss(answer: Tensor, seed: int = seed) -> float:
            probe.answer = answer
            with _tiny.seeded(seed):  # without a generator the teacher walks its means
                return method.loss(Batch(image, None)).item()

        zero = loss(torch.zeros(3))
        target = torch.tensor([(zero - loss(unit) + 1) / 2 for unit in torch.eye(3)], dtype=torch.float64)
        h, z_t, now = probe.asked[-1]
        assert all(asked[1].equal(z_t) for asked in probe.asked[-4:])
        t = now.item()
        before = times[times.index(t) - 1]
        # One noiseless step with √beta·ε = target, from the definitions.
        z0_hat = z_t - math.sqrt(t) * target
        landed = z0_hat + before / t * (z_t - z0_hat)
        grid = [time for time in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0) if before <= time <= t]
        expected = walk(teacher.bridge.epsilon, config.schedule, z_t, h, grid, noise=False)[-1]
        torch.testing.assert_close(landed, expected.detach(), rtol=1e-5, atol=1e-6)
        steps_seen.add(t)
    assert steps_seen == set(times[1:])


def test_a_progressive_student_starts_on_the_bridge(ensemble: Ensemble) -> None:
    """At t = 1 the state is Z_1; below it, it is spread about the line between both ends."""
    method = StepDistillation(bridge_to(ensemble), (0.0, 0.2, 1.0), mode="progressive")
    method.student.score = probe = Probe()
    for seed in range(8):
        one = batch(seed)
        method.loss(one)
        z0, z1, _ = method.teacher.ends(Batch(one.images, None, _tiny.generator(seed)))
        _, z_t, t = probe.asked[-1]
        assert len(t.unique()) == 1
        deviation = math.sqrt(1e-4 * t[0] * (1 - t[0]))
        away = (z_t - (1 - t[:, None]) * z0 - t[:, None] * z1).abs().max()
        assert away < 5 * deviation + 1e-6
    assert len({t[0].item() for _, _, t in probe.asked}) == 2


def test_the_students_prediction_is_its_own_and_starts_as_the_teachers(ensemble: Ensemble) -> None:
    teacher = bridge_to(ensemble)
    before = weights(teacher.bridge)
    method = StepDistillation(teacher)
    assert method.student.times == (0.0, 1.0)
    assert same(weights(method.student), before)
    one_step = teacher.with_bridge(teacher.bridge.one_step()).log_probs(_tiny.images())
    torch.testing.assert_close(method.log_probs(_tiny.images()), one_step)
    eb.fit(method, _tiny.data(), FEW_STEPS)
    assert same(weights(teacher.bridge), before)
    assert not method.log_probs(_tiny.images()).allclose(one_step)
    assert teacher.bridge.steps == 5
    assert method.ema == teacher.ema


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"mode": "at once"}, "mode is 'at once'"),
        ({"weight": 1.5}, "weight is 1.5"),
        ({"weight": -0.5}, "weight is -0.5"),
        ({"weight": math.nan}, "weight is nan"),
        ({"times": (0.0, 0.5, 1.0), "mode": "progressive"}, "times are (0.0, 0.5, 1.0)"),
        ({"times": (0.0, 0.2, 1.0), "mode": "direct"}, "times are (0.0, 0.2, 1.0)"),
    ],
)
def test_a_bad_distillation_is_refused_with_its_value(
    ensemble: Ensemble, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        StepDistillation(bridge_to(ensemble), **arguments)


# The fast ensemble


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_fast_ensemble_is_the_mean_of_its_bridges_and_runs_its_source_once(
    ensemble: Ensemble, count: int
) -> None:
    methods = [bridge_to(ensemble, seed) for seed in range(count)]
    images = _tiny.images()
    expected = torch.stack([method.log_probs(images).exp() for method in methods]).mean(0)
    fast, calls = FastEnsemble.of(*methods).eval(), count_runs(ensemble)
    torch.testing.assert_close(fast(images).softmax(-1), expected, rtol=1e-5, atol=1e-6)
    assert calls == {0: 1}
    assert fast.source is ensemble.source
    assert [each.score for each in fast.each_bridge()] == [method.bridge.score for method in methods]


@torch.no_grad()
def test_a_temperature_divides_the_fast_ensembles_logits(ensemble: Ensemble) -> None:
    bridges = [bridge_to(ensemble, seed).bridge for seed in range(2)]
    plain, hot = (
        FastEnsemble(ensemble.source, bridges, _tiny.FEATURE, temperature=t).eval()(_tiny.images())
        for t in (1.0, 1.7)
    )
    torch.testing.assert_close(plain, 1.7 * hot)


def test_a_fast_ensemble_knows_how_many_members_it_stands_for() -> None:
    ensemble = _tiny.ensemble(5)
    targets = [(0, 1, 2), (0, 3)]
    assert FastEnsemble.of(*(bridge_to(ensemble, target=t) for t in targets)).members == 4
    assert FastEnsemble.of(bridge_to(ensemble)).members == 5


def test_a_bad_fast_ensemble_is_refused(ensemble: Ensemble) -> None:
    here, there = bridge_to(ensemble), bridge_to(_tiny.ensemble(3, seed=7))
    with pytest.raises(ValueError, match="do not share one source"):
        FastEnsemble.of(here, there)
    elsewhere = DiffusionBridge(ensemble, _tiny.score(), "stem")
    with pytest.raises(ValueError, match="one feature"):
        FastEnsemble.of(here, elsewhere)
    with pytest.raises(ValueError, match="0 bridges"):
        FastEnsemble.of()
    with pytest.raises(ValueError, match="0 bridges"):
        FastEnsemble(ensemble.source, [], _tiny.FEATURE)
    with pytest.raises(ValueError, match="'layer9'"):
        FastEnsemble(ensemble.source, [here.bridge], "layer9")
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"temperature is {temperature}"):
            FastEnsemble(ensemble.source, [here.bridge], _tiny.FEATURE, temperature=temperature)


# The deep ensemble


def test_the_members_loss_is_the_sum_of_their_cross_entropies() -> None:
    members, data = [_tiny.member(0), _tiny.batch_norm_member(1), _tiny.member(2)], _tiny.data(6)
    found = DeepEnsemble(members).loss(Batch(data.images, data.labels))
    expected = 0.0
    for member in members:
        log_p = scipy.special.log_softmax(member(data.images).detach().double().numpy(), axis=-1)
        expected -= log_p[np.arange(6), data.labels.numpy()].mean()
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_members_trained_together_get_the_gradients_they_would_get_alone() -> None:
    members, data = [_tiny.member(0), _tiny.member(1)], _tiny.data(6)
    alone = copy.deepcopy(members[1])
    DeepEnsemble(members).loss(Batch(data.images, data.labels)).backward()
    DeepEnsemble([alone]).loss(Batch(data.images, data.labels)).backward()
    for one, other in zip(members[1].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)


@torch.no_grad()
def test_the_deep_ensembles_prediction_is_the_mean_softmax() -> None:
    members = [_tiny.member(0), _tiny.batch_norm_member(1)]
    mean = torch.stack([member(_tiny.images()).softmax(-1) for member in members]).mean(0)
    torch.testing.assert_close(DeepEnsemble(members).log_probs(_tiny.images()).exp(), mean)


def test_members_cannot_learn_without_labels() -> None:
    with pytest.raises(ValueError, match="labels"):
        DeepEnsemble([_tiny.member()]).loss(batch())


def test_a_bridge_without_configuration_takes_the_score_networks_reading_of_z() -> None:
    for z_input in ("dead", "none", "informative", "paper"):
        method = DiffusionBridge(_tiny.ensemble(), _tiny.score(z_input=z_input))
        assert method.bridge.config.z_input == z_input
    with pytest.raises(ValueError, match="'dead', the configuration says 'none'"):
        DiffusionBridge(_tiny.ensemble(), _tiny.score(z_input="dead"), config=BridgeConfig())


def test_a_score_network_of_other_classes_is_refused() -> None:
    score = eb.nets.ScoreNet(5, 8, [(1, 8, 1, 1)], 8, z_input="none")
    with pytest.raises(ValueError, match="5 classes and the members 3"):
        DiffusionBridge(_tiny.ensemble(), score).loss(Batch(_tiny.data().images[:2], None))


def test_the_released_noise_reaches_predictions_and_repeats_itself() -> None:
    images = _tiny.data().images[:4]
    exact = DiffusionBridge(_tiny.ensemble(), _tiny.score(z_input="none"))
    noisy = exact.with_bridge(Bridge(exact.bridge.score, BridgeConfig(variance="released")))
    for method in (exact, noisy):
        method.bridge.eval()
    assert noisy.log_probs(images).equal(noisy.log_probs(images))
    assert not noisy.log_probs(images).equal(exact.log_probs(images))
    assert noisy.log_probs(images).allclose(exact.log_probs(images), atol=0.2)


def test_labels_outside_the_members_classes_are_named() -> None:
    method = DeepEnsemble([_tiny.ensemble().source])
    with pytest.raises(ValueError, match="labels span 0 to 7; members of 3 classes need 0 to 2"):
        method.loss(Batch(_tiny.data().images[:2], torch.tensor([0, 7])))
