"""Batches and methods trained together: teachers run once, students learn what they would alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _runs
import _tiny
import ensbridge as eb
from ensbridge.data import Augment
from ensbridge.methods import (
    AbstractMethod,
    Batch,
    BridgeConfig,
    BridgeNetwork,
    DeepEnsemble,
    DiffusionBridge,
    EmaRule,
    EnsembleDistillation,
    JointTraining,
    ProxyEnD2,
    StepDistillation,
)
from ensbridge.methods.base import feature_names_of
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.features import forward_with_features
from ensbridge.training import FitConfig
from ensbridge.training.fit import seems_finished


@pytest.fixture
def ensemble() -> Ensemble:
    return _tiny.ensemble(3)


def test_methods_trained_together_share_one_pass_of_their_teachers(ensemble: Ensemble) -> None:
    calls = _tiny.count_runs(ensemble)
    several = {
        "kl": _tiny.bridge_to(ensemble, 0, loss="kl"),
        "bridge": _tiny.bridge_to(ensemble, 1),
        "control": _tiny.bridge_to(ensemble, 2, target=(0,)),
    }
    several["distilled"] = StepDistillation(several["bridge"])
    losses = JointTraining(several).losses(_tiny.batch())
    assert calls == {0: 1, 1: 1, 2: 1}
    assert [(name, loss.ndim) for name, loss in losses.items()] == [(name, 0) for name in several]


def test_training_together_gives_what_training_alone_gives(ensemble: Ensemble) -> None:
    config = BridgeConfig(temperature=_tiny.CONSTANT)

    def two() -> dict[str, DiffusionBridge]:
        control = _tiny.bridge_to(ensemble, 2, loss="kl", config=config, target=(0,))
        return {"bridge": _tiny.bridge_to(ensemble, 1, loss="kl", config=config), "control": control}

    together, alone = two(), two()
    start = {name: _tiny.state(method.student) for name, method in together.items()}
    eb.fit(JointTraining(together), _tiny.data(), _tiny.FEW_STEPS)
    for name, method in alone.items():
        eb.fit(method, _tiny.data(), _tiny.FEW_STEPS)
        assert not _tiny.same(_tiny.state(method.student), start[name])
        assert _tiny.same(_tiny.state(together[name].student), _tiny.state(method.student))


def test_joint_training_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="0 methods"):
        JointTraining({})


def test_each_method_keeps_its_own_average(ensemble: Ensemble) -> None:
    config = BridgeConfig(ema=0.5, ema_warmup=False)
    several: dict[str, AbstractMethod] = {
        "slow": _tiny.bridge_to(ensemble),
        "none": DeepEnsemble([_tiny.member(8)]),
        "fast": _tiny.bridge_to(ensemble, config=config),
    }
    rules = [("slow", EmaRule(0.99995)), ("fast", EmaRule(0.5, warmup=False))]
    assert list(JointTraining(several).averages()) == rules


# A batch and what it remembers


def test_a_batch_remembers_each_network_and_feature_apart(ensemble: Ensemble) -> None:
    calls, other = _tiny.count_runs(ensemble), _tiny.ensemble(2, seed=5)
    one = _tiny.batch()
    first = one.teacher_outputs(ensemble, "stem")
    assert one.teacher_outputs(ensemble, "stem").feature is first.feature
    assert one.teacher_outputs(ensemble, "stem").logits.equal(first.logits)
    assert calls == {0: 1, 1: 1, 2: 1}
    logits, feature = forward_with_features(ensemble.source, _tiny.images(), "stem")
    assert first.feature.equal(feature)
    assert first.logits.equal(ensemble.member_logits(_tiny.images()))
    assert not first.feature.requires_grad
    assert not first.logits.requires_grad
    head = one.teacher_outputs(ensemble, "head")
    assert head.feature.equal(logits)
    assert one.teacher_outputs(other, "stem").logits.equal(other.member_logits(_tiny.images()))
    again = _tiny.batch().teacher_outputs(ensemble, "stem")  # another batch asks anew
    assert again.feature is not first.feature


def test_ensembles_that_share_members_share_their_passes(ensemble: Ensemble) -> None:
    source, second, third = ensemble.members
    calls, one = _tiny.count_runs(ensemble), _tiny.batch()
    logits = one.member_logits(ensemble)
    assert one.member_logits(ensemble.first(2)).equal(logits[:2])
    assert one.member_logits(Ensemble([third, source])).equal(logits[[2, 0]])
    assert one.member_logits(Ensemble([second, second])).equal(logits[[1, 1]])
    assert calls == {0: 1, 1: 1, 2: 1}
    assert not logits.requires_grad


def test_a_teacher_that_works_in_place_has_images_of_its_own() -> None:
    class InPlace(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.sub_(0.5).flatten(1)[:, :3]

    one = _tiny.batch()
    one.member_logits(Ensemble([InPlace(), InPlace()]))
    assert one.images.equal(_tiny.images())


def test_named_taps_come_with_the_first_pass(ensemble: Ensemble) -> None:
    teachers = [(ensemble, "stem"), (ensemble.first(1), "stages.0.0"), (ensemble, None), (ensemble, "stem")]
    feature_names = feature_names_of(teachers)
    assert list(feature_names) == list(ensemble.members)
    assert list(feature_names.values()) == [("stem", "stages.0.0"), (), ()]
    calls, one = _tiny.count_runs(ensemble), Batch(_tiny.images(), None, feature_names=feature_names)
    one.member_logits(ensemble)
    seen = [one.teacher_outputs(ensemble, feature) for feature in ("stages.0.0", "stem", "stages.0.0")]
    assert calls == {0: 1, 1: 1, 2: 1}
    for found, feature in zip(seen, ("stages.0.0", "stem", "stages.0.0"), strict=True):
        assert found.feature.equal(_tiny.teacher_outputs(ensemble, feature).feature)


def test_a_given_runner_takes_the_networks_place(ensemble: Ensemble) -> None:
    seen = _tiny.teacher_outputs(ensemble)
    calls = _tiny.count_runs(ensemble)
    method = _tiny.bridge_to(ensemble, loss="kl", config=BridgeConfig(temperature=_tiny.CONSTANT))
    feature_names = feature_names_of(method.teachers())
    outputs = [(seen.logits[0], seen.feature), (seen.logits[1],), (seen.logits[2],)]
    runners: dict[nn.Module, Any] = {
        member: lambda images, given=given: given
        for member, given in zip(ensemble.members, outputs, strict=True)
    }
    found = method.loss(Batch(_tiny.images(), None, feature_names=feature_names, runners=runners))
    assert not calls
    assert found.equal(method.loss(_tiny.batch()))


# All methods at once


def baselines(ensemble: Ensemble) -> dict[str, AbstractMethod]:
    """ED, EnD², two BN on different features, and DBN; none of them lets a draw change its loss."""
    source = ensemble.source
    config = BridgeConfig(temperature=_tiny.CONSTANT, ema=0.5)
    return {
        "ed": EnsembleDistillation(ensemble, _tiny.member(21)),
        "end2": ProxyEnD2(ensemble, _tiny.member(22)),
        "bn": _tiny.bridge_network(source, [ensemble.members[1]], 23),
        "bn2": BridgeNetwork(source, [ensemble.members[2]], _tiny.pooled(24), "stem"),
        "dbn": _tiny.bridge_to(ensemble, 25, loss="kl", config=config),
        "control": _tiny.bridge_to(ensemble, 26, loss="kl", config=config, target=(0,)),
    }


def configs() -> dict[str, FitConfig]:
    """SGD and Adam, with and without warm-up and decay, on the same batches."""
    adam = replace(_tiny.FEW_STEPS, epochs=2, augment=Augment(mixup=0.4))
    sgd = replace(adam, optimizer="sgd", lr=0.1, weight_decay=1e-3)
    return {
        "ed": sgd,
        "end2": adam,
        "bn": replace(sgd, lr=0.05, momentum=0.5, weight_decay=0.0),
        "bn2": replace(adam, lr=1e-3, warmup_steps=3),
        "dbn": replace(adam, lr=3e-3),
        "control": sgd,
    }


def test_all_baselines_run_each_teacher_once_a_batch(ensemble: Ensemble) -> None:
    method, calls = JointTraining(baselines(ensemble)), _tiny.count_runs(ensemble)
    feature_names = feature_names_of(method.teachers())
    assert feature_names[ensemble.source] == (_tiny.FEATURE, "stem")
    found = method.losses(Batch(_tiny.images(), None, _tiny.generator(0), feature_names))
    assert calls == {0: 1, 1: 1, 2: 1}
    for name, each in baselines(ensemble).items():
        assert found[name].equal(each.loss(_tiny.batch()))
    calls.clear()
    steps = eb.fit(method, _tiny.data(), _tiny.FEW_STEPS).steps
    assert set(calls.values()) == {steps + 1}  # and one image before the run, to see that they can


def test_with_a_configuration_each_they_learn_to_the_bit_what_they_learn_alone(ensemble: Ensemble) -> None:
    together, own = baselines(ensemble), configs()
    start = {name: _tiny.state(method.student) for name, method in together.items()}
    eb.fit(JointTraining(together), _tiny.data(), own)
    for name, alone in baselines(ensemble).items():
        eb.fit(alone, _tiny.data(), own[name])
        assert _tiny.same(_tiny.state(together[name].student), _tiny.state(alone.student)), name
        assert not _tiny.same(_tiny.state(alone.student), start[name]), name


def test_one_configuration_for_all_is_one_for_each(ensemble: Ensemble) -> None:
    one, each = baselines(ensemble), baselines(ensemble)
    eb.fit(JointTraining(one), _tiny.data(), _tiny.FEW_STEPS)
    eb.fit(JointTraining(each), _tiny.data(), dict.fromkeys(each, _tiny.FEW_STEPS))
    for name, method in one.items():
        assert _tiny.same(_tiny.state(method.student), _tiny.state(each[name].student)), name


def test_the_log_tells_each_methods_loss(tmp_path: Path) -> None:
    methods = {name: _runs.Spoilt(each) for name, each in _runs.baselines().items()}
    eb.fit(JointTraining(methods), _runs.data(), _runs.config("together"), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
    for number, line in enumerate(lines):
        assert list(line["losses"]) == list(methods)
        for name, method in methods.items():
            part = method.seen[3 * number : 3 * number + 3]
            assert line["losses"][name] == pytest.approx(sum(part) / 3, rel=1e-6)
        assert line["loss"] == pytest.approx(sum(line["losses"].values()), rel=1e-6)


@pytest.mark.parametrize(
    ("field", "value"), [("epochs", 3), ("batch_size", 5), ("seed", 1), ("augment", Augment())]
)
def test_configurations_of_other_batches_are_refused(
    field: str, value: Any, ensemble: Ensemble, tmp_path: Path
) -> None:
    own = configs()
    own["end2"] = replace(own["end2"], **{field: value})
    with pytest.raises(ValueError, match=rf"^ed and end2 .*\b{field}\b"):
        eb.fit(JointTraining(baselines(ensemble)), _tiny.data(), own, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_configurations_of_other_methods_are_refused(ensemble: Ensemble) -> None:
    methods, own = baselines(ensemble), configs()
    names = "ed, end2, bn, bn2, dbn, control"
    missing = {name: each for name, each in own.items() if name != "dbn"}
    for given in (missing, {**own, "more": own["ed"]}, {}):
        with pytest.raises(ValueError, match=rf" {', '.join(given)};.* {names}:"):
            eb.fit(JointTraining(methods), _tiny.data(), given)
    for given in ({"ed": own["ed"]}, {}):
        with pytest.raises(ValueError, match=rf" {', '.join(given)};.* one:"):
            eb.fit(methods["ed"], _tiny.data(), given)


class _InTwoParts(EnsembleDistillation):
    """A student whose head has an optimiser of its own."""

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__(ensemble, nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Linear(8, 3)))
        self.parts = ("1", "2")


@pytest.mark.parametrize("around", [False, True])
def test_parts_of_a_student_may_have_an_optimizer_each(ensemble: Ensemble, around: bool) -> None:
    method = _InTwoParts(ensemble)
    before = {name: weight.detach().clone() for name, weight in method.student.named_parameters()}
    still = FitConfig(epochs=1, batch_size=8, lr=1e-30, optimizer="sgd")
    own = {"1": still, "2": replace(still, lr=0.1)}
    if around:  # among other methods
        eb.fit(JointTraining({"a": method}), _tiny.data(), {f"a.{part}": each for part, each in own.items()})
    else:
        eb.fit(method, _tiny.data(), own)
    moved = {name for name, weight in method.student.named_parameters() if not weight.equal(before[name])}
    assert moved == {"2.weight", "2.bias"}


def test_a_run_with_other_configurations_is_refused(tmp_path: Path) -> None:
    _runs.begin("together", tmp_path)
    files, own = _runs.contents(tmp_path), _runs.config("together")
    own["end2"] = replace(own["end2"], lr=0.5)
    with pytest.raises(ValueError, match=r"fit\.end2\.lr is 0\.02 .*0\.5"):
        eb.fit(_runs.method("together"), _runs.data(), own, tmp_path, _runs.unexpected)
    assert _runs.contents(tmp_path) == files


def test_methods_of_any_name_can_be_resumed(tmp_path: Path) -> None:
    def named() -> JointTraining:
        ed, end2, dbn = _runs.baselines().values()
        return JointTraining({"ED, τ = 4": ed, "baselines/EnD²": end2, "/": dbn})

    own = dict(zip(named().methods, _runs.config("together").values(), strict=True))
    with pytest.raises(_runs.Stopped):
        eb.fit(named(), _runs.data(), own, tmp_path, _runs.stop_at(9))
    resumed, whole = named(), named()
    assert eb.fit(resumed, _runs.data(), own, tmp_path).resumed_from == 8
    eb.fit(whole, _runs.data(), own)
    assert _tiny.same(_tiny.state(resumed.student), _tiny.state(whole.student))


def test_a_run_is_finished_when_its_last_checkpoint_is_there(tmp_path: Path) -> None:
    config = _runs.config("members")
    assert not seems_finished(tmp_path, config, _runs.IMAGES)
    _runs.begin("members", tmp_path)
    assert not seems_finished(tmp_path, config, _runs.IMAGES)
    eb.fit(_runs.method("members"), _runs.data(), config, tmp_path)
    assert seems_finished(tmp_path, config, _runs.IMAGES)
    assert not seems_finished(tmp_path, replace(config, epochs=2 * config.epochs), _runs.IMAGES)


# What a method names


def test_a_method_names_its_teachers_and_the_networks_that_it_trains(ensemble: Ensemble) -> None:
    first, second, third = ensemble.members
    one, other = _tiny.bridge_to(ensemble), _tiny.bridge_to(ensemble, 1)
    elsewhere = DiffusionBridge(ensemble, _tiny.score(), "stem")
    every = {first: (_tiny.FEATURE,), second: (), third: ()}
    assert feature_names_of(one.teachers()) == feature_names_of(StepDistillation(one).teachers()) == every
    together = JointTraining({"one": one, "other": other, "elsewhere": elsewhere})
    assert feature_names_of(together.teachers()) == every | {first: (_tiny.FEATURE, "stem")}
    assert list(DeepEnsemble([_tiny.member()]).teachers()) == []
    for method in (one, StepDistillation(one), together, DeepEnsemble([_tiny.member()])):
        inside = {id(p) for network in method.networks() for p in network.parameters()}
        assert inside == {id(p) for p in method.student.parameters()}


@pytest.mark.parametrize("target", [(0,), (0, 2), (1, 2), (2,)])
def test_members_that_are_not_learnt_from_do_not_run(ensemble: Ensemble, target: tuple[int, ...]) -> None:
    bridge = DiffusionBridge(ensemble, _tiny.score(), loss="kl", target=target)
    images = _tiny.images()
    assert list(feature_names_of(bridge.teachers())) == [ensemble.members[i] for i in sorted({0, *target})]
    z0, _, _ = bridge.ends(Batch(images, None))
    chosen = Ensemble([ensemble.members[index] for index in target])
    torch.testing.assert_close(z0, chosen(images).detach())
