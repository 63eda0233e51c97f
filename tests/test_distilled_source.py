"""`compress` with a distilled source: the user's networks stay, passes are equal, "auto" keeps its best."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _tiny
import ensbridge as eb
from ensbridge.evaluation.choices import choose
from ensbridge.metrics import fit_temperature, kl_per_image, nll_per_image
from ensbridge.training.candidates import (
    DISTIL_LR,
    FRESH_LR,
    FULL_RATE_STEPS,
    Candidate,
    distil_config,
    lower_rates,
)
from ensbridge.training.checkpoint import RunFolder
from ensbridge.training.step import EagerStep

TRAIN = _tiny.images(96, seed=1)
VAL = _tiny.data(60, seed=3)
MODES = ("frozen", "distilled", "auto")


def members() -> list[nn.Module]:
    return [_tiny.member(seed) for seed in range(3)]


def quick(nets: Any, val: Any = VAL, **options: Any) -> eb.FastEnsemble:
    given = {"budget": 30.0, "epochs": 2.0, "batch_size": 16, "quiet": True, **options}
    return eb.compress(nets, TRAIN, val, **given)


@torch.no_grad()
def distance(nets: list[nn.Module], model: nn.Module) -> float:
    """Mean KL from the members' ensemble on the training images."""
    target = eb.Ensemble(nets)(TRAIN).log_softmax(-1)
    return kl_per_image(target, model.eval()(TRAIN).log_softmax(-1)).mean().item()


@pytest.mark.parametrize("budget", [1.0, 30.0])
@pytest.mark.parametrize("source", MODES)
def test_the_users_networks_stay_as_they_are(source: str, budget: float) -> None:
    nets = [_tiny.batch_norm_member(0), _tiny.member(1), _tiny.member(2).train()]
    for weight in nets[0].parameters():
        weight.requires_grad_(False)
    before = [_tiny.state(net) for net in nets]
    fast = quick(nets, source=source, budget=budget)
    for net, state in zip(nets, before, strict=True):
        assert _tiny.same(_tiny.state(net), state)
        assert _tiny.hooks_of(net) == 0
        assert all(weight.grad is None for weight in net.parameters())
    assert [net.training for net in nets[1:]] == [False, True]
    assert not any(weight.requires_grad for weight in nets[0].parameters())
    shared = {weight.data_ptr() for net in nets for weight in net.parameters()}
    assert not any(weight.data_ptr() in shared for weight in fast.parameters())
    assert fast.source_distilled or _tiny.same(_tiny.state(fast.source), before[0])
    assert not fast.training


@pytest.mark.parametrize("source", MODES)
def test_a_budget_of_one_leaves_one_network(source: str, tmp_path: Path) -> None:
    nets = members()
    fast = quick(nets, source=source, budget=1.0)
    assert len(fast.bridges) == 0
    alone = _tiny.same(_tiny.state(fast.source), _tiny.state(nets[0]))
    assert (fast.members, fast.source_distilled) == ((1, False) if alone else (3, True))
    assert source != "distilled" or fast.source_distilled
    fast.save(tmp_path, scores=fast.fidelity(VAL, members=nets))
    with torch.no_grad():
        assert eb.load(tmp_path)(TRAIN).equal(fast(TRAIN))


def test_without_labels_a_frozen_budget_of_one_is_the_source_itself() -> None:
    nets = members()
    fast = quick(nets, None, budget=1.0, source="frozen")
    assert _tiny.same(_tiny.state(fast.source), _tiny.state(nets[0]))
    assert (fast.source is nets[0], fast.temperature, fast.choices) == (False, 1.0, ())


def test_a_frozen_source_has_the_temperature_that_is_best_on_validation_images() -> None:
    nets = members()
    with torch.no_grad():
        labels = nets[0](VAL.images).argmax(-1)
        labels[::4] = (labels[::4] + 1) % 3  # a quarter is wrong
        want = fit_temperature(nets[0](VAL.images).log_softmax(-1), labels)
    fast = quick(nets, (VAL.images, labels), budget=1.0)
    assert (fast.temperature, fast.source_logit_weight) == (pytest.approx(want), 0.0)
    assert quick(nets, (VAL.images, labels), budget=1.0, calibrate=False).temperature == 1.0


def test_distilled_it_is_nearer_to_the_ensemble_and_a_bridge_is_nearer_still() -> None:
    nets = members()
    alone = quick(nets, None, source="distilled", budget=1.0, epochs=30)
    both = quick(nets, None, source="distilled", epochs=60, lr=1e-2, distil_lr=1e-3)  # which leaves a rest
    start = distance(nets, nets[0])
    assert distance(nets, alone) < start / 10
    assert distance(nets, both) < distance(nets, both.source) < start
    assert (both.members, both.source_distilled, len(both.bridges)) == (3, True, 1)
    assert quick(nets, None, source="distilled", bridges=2).members == 3


@pytest.mark.parametrize("epochs", [0.1, 0.5, 1.0, 2.5])
def test_every_choice_has_the_same_passes(epochs: float) -> None:
    """Images in training batches that a member which is no source has seen."""
    seen = {}
    for source, budget in (("frozen", 30.0), ("distilled", 1.0), ("distilled", 30.0), ("auto", 30.0)):
        nets, batches = members(), []
        nets[1].register_forward_hook(lambda *call, batches=batches: batches.append(len(call[1][0])))
        quick(nets, source=source, budget=budget, epochs=epochs)
        seen[source, budget] = batches.count(16)  # what is tried before has fewer images
    assert set(seen.values()) == {max(1, round(epochs * 96 / 16))}


def test_auto_keeps_the_lowest_of_its_table_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    nets = members()
    fast = quick(nets, source="auto", quiet=False)
    choices = {choice.name: choice for choice in fast.choices}
    assert list(choices) == ["source", "source + bridges", "distilled", "distilled + bridges"]
    (chosen,) = (choice for choice in fast.choices if choice.chosen)
    assert chosen.nll == min(choice.nll for choice in fast.choices)
    assert (len(fast.bridges) > 0) == chosen.name.endswith("bridges")
    assert fast.source_distilled == chosen.name.startswith("distilled")
    assert [choice.macs_ratio == 1.0 for choice in fast.choices] == [True, False, True, False]
    assert all(choice.macs_ratio <= 30 for choice in fast.choices)
    printed = capsys.readouterr().err
    assert all(f"{choice.nll:.4f}" in printed for choice in fast.choices)
    alone = [choice.name for choice in quick(nets, source="auto", budget=1.0).choices]
    assert alone == ["source", "distilled"]


def test_what_auto_tries_is_what_each_choice_trains_alone() -> None:
    """Trained side by side with others, a frozen source's bridges and a distilled one learn the same."""
    nets = members()
    tables = [quick(nets, source="auto", budget=budget).choices for budget in (30.0, 1.0)]
    (first,), (second,) = ([row for row in rows if row.name == "distilled"] for rows in tables)
    assert first.nll == pytest.approx(second.nll, abs=1e-6)


def test_candidates_are_judged_on_images_that_nothing_was_fitted_on() -> None:
    models = {"a": _tiny.member(4), "b": _tiny.member(5)}
    candidates = [Candidate(name, [eb.FastEnsemble(net).eval()]) for name, net in models.items()]
    fast = choose(candidates, VAL, True, lambda _: None)
    assert VAL.labels is not None
    expected = []
    for net in models.values():
        with torch.no_grad():
            log_probs = net(VAL.images).log_softmax(-1)
        losses: list[Tensor] = []
        for fold in torch.arange(len(VAL)).reshape(-1, 5).T:  # each fifth image
            others = torch.tensor([index for index in range(len(VAL)) if index not in fold])
            fitted = fit_temperature(log_probs[others], VAL.labels[others])
            cooled = (log_probs[fold] / (fitted if 0.02 < fitted < 50 else 1.0)).log_softmax(-1)
            losses.append(nll_per_image(cooled, VAL.labels[fold]))
        expected.append(torch.cat(losses).mean().item())
    assert [choice.nll for choice in fast.choices] == pytest.approx(expected, rel=1e-5)
    assert fast.source is models["ab"[expected.index(min(expected))]]


@pytest.mark.parametrize(("source", "killed_at"), [("distilled", 3), ("distilled", 9), ("auto", 5)])
def test_a_run_that_was_killed_resumes_to_the_same_model(
    source: str, killed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nets = members()
    whole = quick(nets, source=source)
    steps, real = 0, EagerStep._step

    def step(self: EagerStep, number: int) -> dict[str, float]:
        nonlocal steps
        steps += 1
        if steps == killed_at:
            raise KeyboardInterrupt
        return real(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(EagerStep, "_step", step)
        patch.setattr(RunFolder, "is_due", lambda self: True)  # a checkpoint after every step
        with pytest.raises(KeyboardInterrupt):
            quick(nets, source=source, run_dir=tmp_path)
    steps = -1000  # never again
    monkeypatch.setattr(EagerStep, "_step", step)
    for left in (12 - killed_at + 1, 0):
        before = steps
        again = quick(nets, source=source, run_dir=tmp_path)
        assert steps - before == left  # nothing is trained twice
        assert _tiny.same(_tiny.state(again), _tiny.state(whole))
        assert (again.temperature, again.choices) == (whole.temperature, whole.choices)


def test_it_is_trained_as_in_the_quick_start_unless_a_rate_is_given(tmp_path: Path) -> None:
    headline = eb.experiments.digits().headline_fit
    assert headline is not None
    given: dict[str, Any] = {"default": {}, "rate": {"distil_lr": 0.03}, "fresh": {"factory": _tiny.member}}
    rates = {"default": headline.lr, "rate": 0.03, "fresh": FRESH_LR}
    for name, options in given.items():
        quick(members(), source="auto", epochs=0.2, run_dir=tmp_path / name, **options)
        configs = json.loads((tmp_path / name / "config.json").read_text())["fit"]
        source = configs.pop("distilled.source")
        steps = eb.FitConfig(source["epochs"], source["batch_size"], lr=1.0).total_steps(len(TRAIN))
        rate = rates[name] * (steps / FULL_RATE_STEPS if name == "default" else 1)  # few steps of a copy
        assert (source["optimizer"], source["weight_decay"]) == (headline.optimizer, headline.weight_decay)
        assert source["lr"] == pytest.approx(rate, rel=1e-12)
        assert {(config["optimizer"], config["lr"]) for config in configs.values()} == {("adam", 2e-3)}


def test_a_copy_that_has_steps_enough_is_distilled_at_the_full_rate() -> None:
    config = eb.FitConfig(epochs=1, batch_size=2, lr=1e-3)
    configs = {"bridge": config, "source": distil_config(config)}
    for steps, share in ((6, 0.01), (300, 0.5), (FULL_RATE_STEPS, 1), (10_000, 1)):
        lowered = lower_rates(configs, steps)
        assert lowered["bridge"] == config
        assert lowered["source"].lr == pytest.approx(share * DISTIL_LR)


def test_a_factory_gives_a_fresh_network() -> None:
    nets = members()
    made: list[nn.Module] = []

    def factory() -> nn.Module:
        made.append(eb.nets.ResNet((1, 1), (8, 16), 3, stem=8))
        return made[-1]

    options = {"source": "distilled", "budget": 1.0, "factory": factory}
    one, same, other = (quick(nets, **options, seed=seed) for seed in (0, 0, 1))
    assert one.source is made[0]
    assert _tiny.same(_tiny.state(one), _tiny.state(same))
    assert not _tiny.same(_tiny.state(one), _tiny.state(other))
    fresh = quick(nets, **options, distil_lr=1e-9).source  # as good as untrained
    assert distance(nets, fresh) > 0
    assert not torch.allclose(fresh.head.weight, nets[0].head.weight, atol=1e-3)  # type: ignore[arg-type,union-attr]


def test_a_distilled_source_keeps_its_preprocessing() -> None:
    nets = members()
    own = [lambda images: 2 * images - 1, None, None]
    for factory in (None, lambda: copy.deepcopy(nets[0])):
        options = {"preprocess": own, "source": "distilled", "factory": factory}
        fast = quick(nets, **options, feature=_tiny.FEATURE, distil_lr=1e-9)
        assert isinstance(fast.source, eb.nets.Preprocessed)
        with torch.no_grad():
            torch.testing.assert_close(fast.source(TRAIN), nets[0](2 * TRAIN - 1), atol=1e-4, rtol=1e-4)
        fast.fidelity(VAL, members=nets, preprocess=own)


class Uncopied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _tiny.member()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def __deepcopy__(self, memo: object) -> Uncopied:
        raise TypeError("no copies")


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        (None, {"source": "thawed"}, "source is 'thawed'"),
        (None, {"source": "frozen", "factory": _tiny.member}, "source is 'frozen'"),
        (None, {"source": "distilled", "factory": _tiny.member()}, "factory is a ResNet"),
        (None, {"source": "distilled", "factory": dict}, "factory returned a dict"),
        (None, {"source": "distilled", "factory": _tiny.pooled}, "factory returned a Sequential"),
        (None, {"source": "distilled", "distil_lr": 0}, "distil_lr is 0"),
        (None, {"source": "distilled", "distil_lr": 1e30}, "distil_lr below 1e+30"),
        (Uncopied, {"source": "distilled"}, "(no copies)"),
    ],
)
def test_what_cannot_be_distilled_is_named(source: Any, options: dict[str, Any], words: str) -> None:
    nets = [(source or _tiny.member)(), _tiny.member(1)]
    before = [_tiny.state(net) for net in nets]
    with pytest.raises(ValueError) as refused:
        quick(nets, **options)
    assert words in str(refused.value)
    assert all(_tiny.same(_tiny.state(net), state) for net, state in zip(nets, before, strict=True))


@pytest.mark.parametrize(("budget", "taken"), [(30.0, "frozen"), (1.0, "distilled")])
@pytest.mark.parametrize("val", [None, VAL.images], ids=["none", "unlabelled"])
def test_without_labels_nothing_is_chosen_by_auto(
    val: Any, budget: float, taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nets = members()
    fast = quick(nets, val, budget=budget, quiet=False)
    assert f"source={taken!r}" in capsys.readouterr().err
    assert _tiny.same(_tiny.state(fast), _tiny.state(quick(nets, val, budget=budget, source=taken)))


def test_a_distillation_that_fails_costs_auto_that_candidate_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nets = members()
    fast = quick(nets, source="auto", distil_lr=1e30, quiet=False)
    assert [choice.name for choice in fast.choices] == ["source", "source + bridges"]
    assert "distillation failed" in capsys.readouterr().err
    assert [choice.name for choice in quick(nets, source="auto", budget=1.0, distil_lr=1e30).choices] == []


def test_a_factory_serves_auto_too() -> None:
    nets = members()
    options = {"source": "auto", "factory": lambda: eb.nets.ResNet((1, 1), (8, 16), 3, stem=8)}
    one, other = (quick(nets, **options, distil_lr=1e-9), quick(nets, source="auto", distil_lr=1e-9))
    rows = [{choice.name: choice.nll for choice in fast.choices} for fast in (one, other)]
    assert rows[0]["source"] == rows[1]["source"] == pytest.approx(rows[1]["distilled"], abs=1e-3)
    assert rows[0]["distilled"] != pytest.approx(rows[1]["distilled"], abs=1e-3)  # a fresh one


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half])
def test_half_precision_is_not_distilled(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    nets = [_tiny.member(seed).to(dtype) for seed in range(2)]
    train, val = TRAIN.to(dtype), (VAL.images.to(dtype), VAL.labels)
    options: dict[str, Any] = {"budget": 30.0, "epochs": 0.3, "batch_size": 16}
    with pytest.raises(ValueError, match=rf"{dtype}.*\.float\(\).*'frozen'"):
        eb.compress(nets, train, val, source="distilled", quiet=True, **options)
    fast = eb.compress(nets, train, val, source="auto", **options)
    assert [choice.name for choice in fast.choices] == ["source", "source + bridges"]
    assert str(dtype) in capsys.readouterr().err
    nets = [net.float() for net in nets]
    fast = eb.compress(nets, train.float(), (val[0].float(), val[1]), quiet=True, **options)
    assert len(fast.choices) == 4


class Uncopied(nn.Module):
    """A member that keeps something that cannot be copied."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net, self.lock = _tiny.member(seed), threading.Lock()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)


def test_what_cannot_be_copied_is_not_distilled() -> None:
    nets: list[nn.Module] = [Uncopied(0), Uncopied(1)]
    with pytest.raises(ValueError, match=r"cannot be copied.*factory="):
        quick(nets, source="distilled")
    assert [choice.name for choice in quick(nets, epochs=0.3).choices] == ["source", "source + bridges"]


# ------------------------------------------------------------------------------ no bridge fits


class Nothing(nn.Module):
    """A member whose modules return nothing that a bridge could read."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with _tiny.seeded(seed):
            self.weight = nn.Parameter(torch.randn(192, 3))

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) @ self.weight


WITHOUT_BRIDGES: dict[str, tuple[Any, float, str]] = {
    "budget": (_tiny.member, 1.0001, "no bridge fits ×1.0001"),
    "feature": (Nothing, 1.5, "no feature"),
}


@pytest.mark.parametrize("kind", WITHOUT_BRIDGES)
def test_auto_does_without_bridges_where_none_fits(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    build, budget, words = WITHOUT_BRIDGES[kind]
    nets = [build(seed) for seed in range(2)]
    fast = quick(nets, budget=budget, source="auto", epochs=0.3, quiet=False)
    assert [choice.name for choice in fast.choices] == ["source", "distilled"]
    assert len(fast.bridges) == 0
    assert words in capsys.readouterr().err
    with pytest.raises(ValueError, match=words):
        quick(nets, budget=budget, source="frozen")
    unlabelled = quick(nets, None, budget=budget, epochs=0.3)
    assert (unlabelled.source_distilled, len(unlabelled.bridges)) == (True, 0)


def test_a_feature_that_is_named_must_fit() -> None:
    with pytest.raises(ValueError, match=r"no bridge fits ×1\.0001"):
        quick(members(), budget=1.0001, feature="stem")


class Dropped(nn.Module):
    """A member with dropout in it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net, self.dropout = _tiny.member(seed), nn.Dropout(0.3)

    def forward(self, images: Tensor) -> Tensor:
        return self.net(self.dropout(images))


def test_dropout_draws_by_the_step_alone() -> None:
    results = []
    for number in range(2):
        torch.manual_seed(number)
        nets = [Dropped(seed) for seed in range(2)]
        results.append(quick(nets, source="distilled", feature=f"net.{_tiny.FEATURE}"))
    assert _tiny.same(*(_tiny.state(fast) for fast in results))
