"""The bridge: its losses against a computation by hand, its draws, its samples and its presets."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import _tiny
import ensbridge as eb
from ensbridge.bridge.sampler import sample
from ensbridge.bridge.schedule import TemperatureLaw
from ensbridge.methods import (
    Batch,
    Bridge,
    BridgeConfig,
    DiffusionBridge,
)
from ensbridge.models import forward_with_features
from ensbridge.models.ensemble import Ensemble


@pytest.fixture
def ensemble() -> Ensemble:
    return _tiny.ensemble(3)


# The bridge's losses


@pytest.mark.parametrize("preset", ["default", "paper", "released"])
@pytest.mark.parametrize("beta", [1e-4, 0.5])
def test_the_loss_is_beta_times_the_papers(ensemble: Ensemble, preset: Any, beta: float) -> None:
    """Draws are made in the order temperature, time, noise."""
    config = replace(BridgeConfig.preset(preset), beta=beta)
    method = _tiny.bridge_to(ensemble, config=config)
    found = method.loss(_tiny.batch(3))

    draws, seen = _tiny.generator(3), _tiny.teacher_outputs(ensemble)
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

    for loss, rounding in (("bridge", 1e-9), ("kl", 1e-7)):  # a square, and a difference of logarithms
        method = DiffusionBridge(ensemble, Perfect(), _tiny.FEATURE, loss=loss)
        assert method.loss(_tiny.batch()).item() == pytest.approx(0, abs=rounding)
        truth = ensemble(_tiny.images()).log_softmax(-1)
        torch.testing.assert_close(_tiny.predict(method, _tiny.images()), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", [None, (0,), (1, 2)])
def test_the_kl_loss_is_the_mean_relative_entropy(ensemble: Ensemble, target: tuple[int, ...] | None) -> None:
    method = _tiny.bridge_to(
        ensemble, loss="kl", target=target, config=BridgeConfig(temperature=_tiny.CONSTANT)
    )
    seen = _tiny.teacher_outputs(ensemble)
    logits = seen.logits.double().numpy()
    p = scipy.special.softmax(logits[list(target or (0, 1, 2))], axis=-1).mean(0)
    z1 = logits[0] / 2 - logits[0].mean(-1, keepdims=True) / 2
    residual = method.bridge.score(seen.feature, torch.from_numpy(z1).float(), torch.ones(6))
    q = scipy.special.softmax(z1 - residual.detach().double().numpy(), axis=-1)
    expected = scipy.special.rel_entr(p, q).sum(-1).mean()
    assert expected > 1e-3
    assert method.loss(_tiny.batch()).item() == pytest.approx(expected, rel=1e-3)
    assert method.bridge.times == (0.0, 1.0)


def test_a_target_of_the_source_alone_is_its_centred_logit(ensemble: Ensemble) -> None:
    z0, _, seen = _tiny.bridge_to(ensemble, target=(0,)).ends(_tiny.batch())
    expected = seen.logits[0] - seen.logits[0].mean(-1, keepdim=True)
    torch.testing.assert_close(z0, expected, rtol=1e-5, atol=1e-6)


def test_a_target_names_members_by_index(ensemble: Ensemble) -> None:
    z0, _, seen = _tiny.bridge_to(ensemble, target=(2, 1)).ends(_tiny.batch())
    torch.testing.assert_close(z0.softmax(-1), seen.logits[1:].softmax(-1).mean(0))
    assert _tiny.bridge_to(ensemble).target == (0, 1, 2)


@pytest.mark.parametrize("loss", ["bridge", "kl"])
def test_labels_are_never_used(ensemble: Ensemble, loss: Any) -> None:
    nonsense = torch.full((6,), -7)
    method = _tiny.bridge_to(ensemble, loss=loss)
    assert method.loss(_tiny.batch(1)).equal(method.loss(_tiny.batch(1, nonsense)))
    ends = []
    for data in (_tiny.data(), _tiny.data().without_labels()):
        method = _tiny.bridge_to(ensemble, loss=loss)
        eb.fit(method, data, _tiny.FEW_STEPS)
        ends.append(_tiny.state(method.student))
    assert _tiny.same(*ends)


# Times and temperatures


@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("rule", ["grid", "released"])
def test_training_times_are_drawn_evenly_from_their_grid(ensemble: Ensemble, rule: Any, steps: int) -> None:
    method = _tiny.bridge_to(ensemble, config=BridgeConfig(train_times=rule, num_steps=steps))
    counts = Counter(method.draw_times(3000, torch.device("cpu"), _tiny.generator()).tolist())
    last = steps if rule == "grid" else steps - 1
    assert sorted(counts) == [torch.tensor(n / steps).item() for n in range(1, last + 1)]
    assert last == 1 or scipy.stats.chisquare(list(counts.values())).pvalue > 0.001


def test_uniform_training_times_fill_the_half_open_interval(ensemble: Ensemble) -> None:
    method = _tiny.bridge_to(ensemble, config=BridgeConfig(train_times="uniform"))
    t = method.draw_times(20_000, torch.device("cpu"), _tiny.generator())
    assert t.min() > 0
    assert t.max() <= 1
    assert scipy.stats.kstest(t.numpy(), "uniform").pvalue > 0.01


def test_no_uniform_time_is_zero_even_when_the_draw_is(
    ensemble: Ensemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = _tiny.bridge_to(ensemble, config=BridgeConfig(train_times="uniform"))
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
    method = _tiny.bridge_to(ensemble, config=BridgeConfig(temperature_draw=draw))
    _, z1, seen = method.ends(_tiny.batch(1))
    found = temperatures_of(z1, seen.logits[0])
    assert len({round(t, 3) for t in found.tolist()}) == different
    expected = TemperatureLaw().sample((different,), _tiny.generator(1)).expand(6)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


def test_the_test_temperature_is_the_mean_or_drawn(ensemble: Ensemble) -> None:
    logits, h = forward_with_features(ensemble.source, _tiny.images(), _tiny.FEATURE)
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
    logits, h = forward_with_features(ensemble.source, _tiny.images(), _tiny.FEATURE)
    for beta in (1e-4, 1.0):
        bridge = Bridge(_tiny.score(), BridgeConfig(beta=beta)).one_step()
        z1 = bridge.start(logits, TemperatureLaw().mean)
        expected = z1 - bridge.score(h, z1, torch.ones(6))
        torch.testing.assert_close(bridge(h, logits), expected, rtol=1e-4, atol=1e-5)


def test_a_prediction_is_sampled_on_the_bridges_own_times(ensemble: Ensemble) -> None:
    logits, h = forward_with_features(ensemble.source, _tiny.images(), _tiny.FEATURE)
    bridge = Bridge(_tiny.score("informative"), BridgeConfig(z_input="informative"))
    assert bridge.times == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert (bridge.steps, bridge.on_times((0, 0.2, 1)).steps, bridge.one_step().steps) == (5, 2, 1)
    for times in (None, (0.0, 0.3, 1.0)):
        other = bridge if times is None else bridge.on_times(times)
        z1 = bridge.start(logits, TemperatureLaw().mean)
        expected = sample(bridge.epsilon, bridge.schedule, z1, h, times, noise=False)[-1]
        torch.testing.assert_close(other(h, logits), expected)


def test_without_a_generator_a_prediction_is_deterministic_and_with_one_it_is_noisy(
    ensemble: Ensemble,
) -> None:
    logits, h = forward_with_features(ensemble.source, _tiny.images(), _tiny.FEATURE)
    bridge = Bridge(_tiny.score(), BridgeConfig(beta=1.0, variance="released"))
    assert bridge(h, logits).equal(bridge(h, logits))
    noisy = [bridge(h, logits, _tiny.generator(seed)) for seed in (1, 1, 2)]
    assert noisy[0].equal(noisy[1])
    assert not noisy[0].equal(noisy[2])
    assert (noisy[0] - bridge(h, logits)).abs().max() > 0.05


def test_a_copy_on_other_times_has_the_same_weights_and_none_in_common() -> None:
    bridge = Bridge(_tiny.score())
    other = bridge.one_step()
    assert _tiny.same(_tiny.state(bridge), _tiny.state(other))
    nn.init.ones_(other.score.head.bias)
    assert bridge.score.head.bias.ne(1).all()


def test_the_methods_prediction_is_the_sources_logits_through_the_bridge(ensemble: Ensemble) -> None:
    method = _tiny.bridge_to(ensemble)
    logits, h = forward_with_features(ensemble.source, _tiny.images(), _tiny.FEATURE)
    expected = F.log_softmax(method.bridge(h, logits), -1)
    found = _tiny.predict(method, _tiny.images())
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
    "arguments",
    [
        {"beta": -1.0},
        {"num_steps": 0},
        {"variance": "none"},
        {"ema": 1.0},
        {"train_times": "released", "num_steps": 1},
        {"train_times": "grids"},
        {"temperature_draw": "images"},
        {"test_temperature": "draw"},
        {"z_input": "zed"},
        {"distillation": "halving"},
    ],
)
def test_a_bad_configuration_is_refused_with_its_value(arguments: dict[str, Any]) -> None:
    name, value = list(arguments.items())[-1]
    with pytest.raises(ValueError, match=rf"(?i)\b{name}\b.* is {value!r}"):
        BridgeConfig(**arguments)


def test_an_unknown_preset_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'fast'.*default, paper, released"):
        BridgeConfig.preset("fast")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"loss": "mse"}, "loss is 'mse'"),
        ({"target": ()}, "target is ()"),
        ({"target": (0, 3)}, "target is (0, 3)"),
        ({"target": (-1,)}, "target is (-1,)"),
        ({"feature": "layer9"}, "'layer9'"),
        ({"config": BridgeConfig(z_input="dead")}, "'dead'"),
    ],
)
def test_a_bad_bridge_is_refused_with_its_value(
    ensemble: Ensemble, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        DiffusionBridge(ensemble, _tiny.score("none"), **{"feature": _tiny.FEATURE, **arguments})


def test_a_bridge_without_configuration_takes_the_score_networks_reading_of_z() -> None:
    for z_input in ("dead", "none", "informative", "paper"):
        method = DiffusionBridge(_tiny.ensemble(), _tiny.score(z_input=z_input))
        assert method.bridge.config.z_input == z_input
    with pytest.raises(ValueError, match=r"'dead'.*'none'"):
        DiffusionBridge(_tiny.ensemble(), _tiny.score(z_input="dead"), config=BridgeConfig())


def test_a_score_network_of_other_classes_is_refused() -> None:
    score = eb.nets.ScoreNet(5, 8, [(1, 8, 1, 1)], 8, z_input="none")
    with pytest.raises(ValueError, match=r"5 classes.* 3"):
        DiffusionBridge(_tiny.ensemble(), score).loss(Batch(_tiny.data().images[:2], None))


def test_the_released_noise_reaches_predictions_and_repeats_itself() -> None:
    images = _tiny.data().images[:4]
    exact = DiffusionBridge(_tiny.ensemble(), _tiny.score(z_input="none"))
    noisy = exact.with_bridge(Bridge(exact.bridge.score, BridgeConfig(variance="released")))
    for method in (exact, noisy):
        method.bridge.eval()
    assert _tiny.predict(noisy, images).equal(_tiny.predict(noisy, images))
    assert not _tiny.predict(noisy, images).equal(_tiny.predict(exact, images))
    assert _tiny.predict(noisy, images).allclose(_tiny.predict(exact, images), atol=0.2)
