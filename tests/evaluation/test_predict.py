"""Several models on the same images: each as it answers alone, and what they share runs once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import _tiny
import ensbridge as eb
from ensbridge.data import ImageSet
from ensbridge.deploy.batch import predict_images
from ensbridge.evaluation.predict import predict, predict_batch, predict_each
from ensbridge.methods import Bridge, BridgeNetwork
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble


@pytest.fixture
def models() -> dict[str, nn.Module]:
    """Ensembles, bridges and networks that share a source, members and bridges, at two features of it."""
    ensemble = _tiny.ensemble(3)
    source, *others = ensemble.members
    bridges = [_tiny.bridge_to(ensemble, seed) for seed in range(2)]
    networks = [
        BridgeNetwork(source, [other], _tiny.pooled(seed), "stem") for seed, other in enumerate(others)
    ]
    one = FastEnsemble.of(bridges[0])
    return {
        "source": source,
        "DE-2": ensemble.first(2),
        "DE-3": ensemble,
        "+1 DBN": one,
        "+2 DBN": FastEnsemble.of(*bridges),
        "calibrated": FastEnsemble(
            source, list(one.each_bridge()), one.feature, temperature=1.3, source_logit_weight=0.2
        ),
        "+1 BN": FastEnsemble.of(networks[0]),
        "+2 BN": FastEnsemble.of(*networks),
        "another": _tiny.batch_norm_member(7),
    }


@torch.no_grad()
def test_models_together_answer_as_each_alone_to_the_bit(models: dict[str, nn.Module]) -> None:
    images = _tiny.images(11)
    found = predict_batch(models, images)
    assert list(found) == list(models)
    for name, model in models.items():
        assert found[name].equal(model.eval()(images).log_softmax(-1)), name
    alone = {name: predict(model, ImageSet(images), 4) for name, model in models.items()}
    for name, each in predict_each(models, ImageSet(images), 4).items():
        assert each.equal(alone[name]), name
    ensemble = models["DE-3"]
    assert isinstance(ensemble, Ensemble)
    together = predict_each(ensemble.by_size(), ImageSet(images), 4).values()
    for name, each in zip(("source", "DE-2", "DE-3"), together, strict=True):
        torch.testing.assert_close(each, alone[name])


def test_what_is_shared_runs_once_a_batch(models: dict[str, nn.Module]) -> None:
    ensemble, two, networks = (models[name] for name in ("DE-3", "+2 DBN", "+2 BN"))
    assert isinstance(ensemble, Ensemble)
    assert isinstance(two, FastEnsemble)
    assert isinstance(networks, FastEnsemble)
    parts = [*ensemble.members, *two.bridges, *networks.bridges, models["another"]]
    calls, recorded = _tiny.count_runs(parts), []
    predict_each(models, ImageSet(_tiny.images(10)), 4, advance=recorded.append)
    assert calls == dict.fromkeys(range(3 + 2 + 2 + 1), 3)  # batches of 4, 4 and 2
    assert sum(recorded) == 10 * len(models)


def test_one_bridge_behind_two_sources_runs_for_each() -> None:
    bridge = Bridge(_tiny.score())
    fast = {str(seed): FastEnsemble(_tiny.member(seed), [bridge], _tiny.FEATURE).eval() for seed in range(2)}
    with torch.no_grad():
        found = predict_batch(fast, _tiny.images())
        assert all(found[name].equal(each(_tiny.images()).log_softmax(-1)) for name, each in fast.items())
    assert not found["0"].allclose(found["1"])


def test_one_bridge_at_two_features_of_a_source_runs_for_each() -> None:
    source, bridge = _tiny.member(), Bridge(_tiny.score())
    fast = {name: FastEnsemble(source, [bridge], name).eval() for name in ("stem", _tiny.FEATURE)}
    with torch.no_grad():
        found = predict_batch(fast, _tiny.images())
        assert all(found[name].equal(each(_tiny.images()).log_softmax(-1)) for name, each in fast.items())
    assert not found["stem"].allclose(found[_tiny.FEATURE])


def test_a_source_in_half_precision_is_read_as_by_the_model_itself() -> None:
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _tiny.member()

        def forward(self, images: Tensor) -> Tensor:
            return self.net(images).bfloat16()

    fast = FastEnsemble(Halved(), [Bridge(_tiny.score())], f"net.{_tiny.FEATURE}").eval()
    with torch.no_grad():
        found = predict_batch({"fast": fast, "source": fast.source}, _tiny.images())
        assert found["fast"].equal(fast(_tiny.images()).log_softmax(-1))
    assert {each.dtype for each in found.values()} == {torch.float32}


def test_networks_that_work_in_place_and_classes_of_ones_own_answer_as_alone() -> None:
    class InPlace(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.sub_(0.5).flatten(1)[:, :3]

    class Largest(Ensemble):
        def forward(self, images: Tensor) -> Tensor:
            return self.member_logits(images).amax(0)

    models: dict[str, nn.Module] = {
        "in place": InPlace(),
        "largest": Largest(list(_tiny.ensemble().members)),
        "plain": _tiny.member(),
    }
    alone = {name: predict(model, _tiny.data()) for name, model in models.items()}
    for name, each in predict_each(models, _tiny.data()).items():
        assert each.equal(alone[name]), name
    with torch.no_grad():
        assert alone["largest"].equal(models["largest"](_tiny.data().images).log_softmax(-1))


def test_models_are_run_in_evaluation_mode_and_without_gradients() -> None:
    net = _tiny.batch_norm_member()
    expected = predict(net, _tiny.data())
    found = predict_each({"net": net.train()}, _tiny.data())["net"]
    assert found.equal(expected)
    assert not found.requires_grad
    assert predict_each({}, _tiny.data()) == {}


def test_models_of_different_classes_are_named() -> None:
    models = {"three": _tiny.member(), "five": _tiny.member(classes=5)}
    with pytest.raises(ValueError, match=r"'three' has 3 classes, 'five' 5"):
        predict_each(models, _tiny.data())


class Elsewhere(nn.Module):
    """A network whose weights are on another device, and which notes where its images are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta"))
        self.seen: set[str] = set()

    def forward(self, images: Tensor) -> Tensor:
        self.seen.add(images.device.type)
        return torch.ones(len(images), 1) @ torch.arange(3.0)[None]


def test_data_is_brought_to_where_models_are_and_predictions_to_where_it_is() -> None:
    nets = [Elsewhere(), Elsewhere()]
    images, labels = _tiny.images(6), torch.arange(6) % 3
    scores = eb.evaluate(
        {"one": nets[0], "both": eb.Ensemble(nets)}, (images, labels), (images, labels), ood={}
    )
    assert {device for net in nets for device in net.seen} == {"meta"}
    assert [row.acc for row in scores.rows] == [pytest.approx(100 / 3)] * 2
    fast = eb.FastEnsemble(nets[0])
    found = fast.fidelity(images, members=nets)
    assert (found.kl, found.agreement) == (pytest.approx(0, abs=1e-6), 1.0)
    assert {device for net in nets for device in net.seen} == {"meta"}


def test_models_keep_their_modes() -> None:
    nets = [_tiny.member(seed) for seed in range(2)]
    nets[0].train()
    before = [module.training for net in nets for module in net.modules()]
    eb.evaluate({"both": eb.Ensemble(nets)}, (_tiny.images(6), torch.arange(6) % 3), ood={})
    assert [module.training for net in nets for module in net.modules()] == before


def test_images_are_predicted_where_the_model_is() -> None:
    net = Elsewhere()
    predictions = predict_images(eb.FastEnsemble(net), _tiny.images(2))
    assert [prediction.class_index for prediction in predictions] == [2, 2]
    assert net.seen == {"meta"}


@pytest.mark.parametrize(
    ("images", "named"),
    [
        (_tiny.images().double(), r"'net' .*torch\.float64.*\.float\(\)"),
        (_tiny.images()[:, :1], r"'net' .*takes 3 channels.*1"),
    ],
)
def test_images_that_a_model_cannot_take_are_named(images: Tensor, named: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 3))
    with pytest.raises(ValueError, match=named):
        predict_each({"net": net}, ImageSet(images))


def test_models_without_values_are_named() -> None:
    empty = _tiny.member(0).to("meta")
    with pytest.raises(ValueError, match=r"'empty' .*'meta'"):
        predict_each({"net": _tiny.member(1), "empty": empty}, ImageSet(_tiny.images()))
