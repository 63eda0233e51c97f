"""Classifiers of text, tables and several images are compressed, measured, saved and exported, too."""

from __future__ import annotations

import copy
import json
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _tiny
import ensbridge as eb
from ensbridge import cli
from ensbridge.data.augment import Augment, augment_inputs
from ensbridge.data.loader import collect
from ensbridge.deploy.benchmark.runtimes import ready
from ensbridge.metrics.cost import count_macs
from ensbridge.models.feature_choice import list_features
from ensbridge.models.features import read_logits
from ensbridge.models.libraries import import_library
from ensbridge.utils.input_specs import made_up_inputs, specs_of
from ensbridge.utils.inputs import Inputs, call_network, map_inputs, tensors_of

CLASSES, VOCABULARY, LENGTH = 3, 20, 6


def texts(count: int, seed: int) -> dict[str, Tensor]:
    """Made-up tokens with a mask, whose class is that of their mean."""
    draws = _tiny.generator(seed)
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (count, 1), generator=draws)).long()
    ids = torch.randint(1, VOCABULARY, (count, LENGTH), generator=draws) * mask
    means = ids.sum(1) / mask.sum(1)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.bucketize(means, torch.tensor([9.0, 11.0])),
    }


class TextNet(nn.Module):
    """A transformer that is called by name and returns a mapping, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        tokens = self.layer(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        weights = attention_mask[..., None]
        return {"logits": self.head((tokens * weights).sum(1) / weights.sum(1))}


class TwoImages(nn.Module):
    """A classifier of two images of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Conv2d(3, 8, 3), nn.Conv2d(1, 8, 3)
        self.mix, self.head = nn.Linear(16, 32), nn.Linear(32, CLASSES)

    def forward(self, near: Tensor, far: Tensor) -> Tensor:
        maps = [self.near(near).relu().mean((2, 3)), self.far(far).relu().mean((2, 3))]
        return self.head(self.mix(torch.cat(maps, 1)).relu())


def rows_net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def two_images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    draws = _tiny.generator(seed)
    return torch.rand(count, 3, 8, 8, generator=draws), torch.rand(count, 1, 6, 6, generator=draws)


def labels(count: int) -> Tensor:
    return torch.arange(count) % CLASSES


def without_labels(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


# What it is called with, all of it with labels, what builds a member, and the features that bridges may read.
KINDS: dict[str, tuple[Inputs, Any, Callable[[], nn.Module], str]] = {
    "tokens": (without_labels(texts(40, 0)), texts(40, 0), TextNet, "layer"),
    "rows": (torch.rand(40, 8), (torch.rand(40, 8), labels(40)), rows_net, "1"),
    "two images": (two_images(40, 0), (two_images(40, 0), labels(40)), TwoImages, "mix"),
}


def members(build: Callable[[], nn.Module]) -> list[nn.Module]:
    made = []
    for seed in range(3):
        with _tiny.seeded(seed):
            made.append(build().eval())
    return made


def compressed(kind: str, **options: Any) -> tuple[eb.FastEnsemble, list[nn.Module]]:
    inputs, labelled, build, _ = KINDS[kind]
    nets = members(build)
    given = {"budget": 9.0, "epochs": 1, "quiet": True, "source": "frozen", **options}
    return eb.compress(nets, inputs, labelled, **given), nets


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_called_as_its_members_are(kind: str) -> None:
    fast, nets = compressed(kind)
    inputs = KINDS[kind][0]
    with torch.no_grad():
        logits, source = fast.with_source(inputs)
        assert logits.shape == (40, CLASSES)
        output = call_network(nets[0], inputs)
        assert source.allclose(read_logits(output), atol=1e-6)  # fused layers are not hooked
        assert call_network(fast, inputs).equal(logits)
        mean = torch.stack([read_logits(call_network(net, inputs)).softmax(-1) for net in nets]).mean(0)
        assert call_network(eb.Ensemble(nets), inputs).softmax(-1).allclose(mean, atol=1e-6)
    if kind == "tokens":
        compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
        assert call_network(compiled, inputs).allclose(logits, atol=1e-5)


class EndToken(TextNet):
    """A network that made-up tokens cannot satisfy, as one that pools at an end-of-sequence token."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        if input_ids[:, -2:].tolist() != [[7, 0]] * len(input_ids):
            raise IndexError("no end token")
        return super().forward(input_ids, attention_mask)


def test_what_made_up_inputs_cannot_call_is_saved_all_the_same(tmp_path: Path) -> None:
    batch = without_labels(texts(40, 0))
    batch["input_ids"][:, -2:] = torch.tensor([7, 0])
    fast = eb.compress(members(EndToken), batch, budget=9.0, epochs=1, quiet=True, source="frozen")
    fast.save(tmp_path / "model")
    assert "were not counted" in (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    bytes_too = tuple((part * 255).to(torch.uint8) for part in two_images(40, 0))
    fast = eb.compress(members(TwoImages), bytes_too, budget=9.0, epochs=1, quiet=True, source="frozen")
    assert {spec.dtype for spec in fast.input_specs or ()} == {"float32"}
    fast.save(tmp_path / "images")
    assert "multiply-accumulates" in (tmp_path / "images" / "README.md").read_text(encoding="utf-8")


def test_inputs_beyond_what_a_file_may_say_are_left_out(tmp_path: Path) -> None:
    fast, _ = compressed("tokens")
    assert fast.input_specs is not None
    fast.input_specs = tuple(replace(spec, shape=(2**13, 2**13)) for spec in fast.input_specs)
    fast.save(tmp_path / "model")
    assert eb.load(tmp_path / "model", source=members(TextNet)[0]).input_specs is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_the_same_after_saving(kind: str, tmp_path: Path) -> None:
    fast, _ = compressed(kind)
    fast.save(tmp_path)
    with torch.no_grad():
        expected = call_network(fast, KINDS[kind][0])
        assert call_network(eb.load(tmp_path, source=KINDS[kind][2]()), KINDS[kind][0]).equal(expected)


@pytest.mark.parametrize("kind", ["tokens", "rows"])
def test_a_saved_model_tells_what_it_is_called_with(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that the commands need no Python and no data."""
    fast, _ = compressed(kind)
    inputs, _, build, _ = KINDS[kind]
    name = build.__name__
    fast.members = 1  # so that no ensembles are timed beside it
    fast.save(tmp_path / "model", build=f"test_any_inputs:{name}", arguments={})
    monkeypatch.setitem(sys.modules, "test_any_inputs", sys.modules[__name__])
    loaded = eb.load(tmp_path / "model", allow=[f"test_any_inputs:{name}"])
    assert (loaded.image_shape, loaded.input_specs) == (fast.image_shape, fast.input_specs)
    if loaded.input_specs is None:
        assert loaded.image_shape == (8,)
    else:
        assert loaded.input_specs == specs_of(inputs)
        example = made_up_inputs(loaded.input_specs, 50)
        for made, given in zip(tensors_of(example), tensors_of(inputs), strict=True):
            assert (made.dtype, made.shape[1:]) == (given.dtype, given.shape[1:])
            assert made.is_floating_point() or given.min() <= made.min() <= made.max() <= given.max()
        with torch.no_grad():
            assert call_network(loaded, example).isfinite().all()

    def run(command: str, *options: str) -> int:
        allow = ["--allow", f"test_any_inputs:{name}"]
        monkeypatch.setattr(sys, "argv", ["ensbridge", command, str(tmp_path / "model"), *options, *allow])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return int(left.value.code or 0)

    assert run("export", "--to", "pt2") == 0
    graph = torch.export.load(tmp_path / "model" / "model.pt2").module()
    with torch.no_grad():
        assert call_network(graph, inputs).allclose(call_network(fast, inputs), atol=1e-5)
    capsys.readouterr()
    assert run("bench", "--runtime", "eager", "--batch", "2", "--rounds", "1", "--json", "--quiet") == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["problem"] is None
    first = map_inputs(lambda tensor: tensor[:1], inputs)
    assert [row["macs"] for row in table["rows"][:2]] == [
        count_macs(net, first) for net in (fast.source, fast)
    ]
    assert run("predict", "a.png") == 2
    assert capsys.readouterr().err.count("is no CSV") == 1


@pytest.mark.parametrize(("kind", "runtime"), [("tokens", "onnxruntime"), ("two images", "compiled")])
def test_models_of_several_inputs_are_timed(kind: str, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if runtime == "onnxruntime":
        pytest.importorskip("onnxruntime")
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)  # which takes a minute
    inputs, _, build, _ = KINDS[kind]
    fast = eb.FastEnsemble(build().eval()).eval()
    with torch.no_grad():
        logits = call_network(fast, inputs)
    assert ready(runtime, fast, inputs, 1, fast).call().allclose(logits, atol=1e-5)


@pytest.mark.parametrize("kind", ["tokens", "two images"])
def test_onnx_gives_the_logits_of_model_and_source(kind: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    fast, _ = compressed(kind)
    fast.class_names = ("low", "middle", "high")
    inputs = map_inputs(lambda tensor: tensor[:5], KINDS[kind][0])
    eb.export(fast, tmp_path / "model.onnx", to="onnx", example=inputs)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    names = [given.name for given in session.get_inputs()]
    if isinstance(inputs, Mapping):
        assert names == list(inputs)
    assert [given.name for given in session.get_outputs()] == ["logits", "source_logits"]
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["class_names"]) == ["low", "middle", "high"]
    feed = {name: tensor.numpy() for name, tensor in zip(names, tensors_of(inputs), strict=True)}
    with torch.no_grad():
        for found, expected in zip(session.run(None, feed), fast.with_source(inputs), strict=True):
            assert torch.from_numpy(found).allclose(expected, atol=1e-5)


def test_a_graph_of_torch_is_called_by_name_too(tmp_path: Path) -> None:
    fast, _ = compressed("tokens")
    inputs = without_labels(texts(7, 3))
    eb.export(fast, tmp_path / "model.pt2", to="pt2", example=inputs)
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        assert loaded(**inputs).allclose(fast(**inputs), atol=1e-5)


def test_eight_threads_share_a_model() -> None:
    fast, _ = compressed("tokens")
    batches = [without_labels(texts(9, seed)) for seed in range(8)]
    with torch.no_grad():
        expected = [fast(**batch) for batch in batches]
    found: dict[int, list[bool]] = {}

    def run(number: int) -> None:
        with torch.no_grad():
            found[number] = [fast(**batches[number]).equal(expected[number]) for _ in range(5)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [True] * 5 for number in range(8)}


def test_a_control_that_is_as_good_is_said_to_be() -> None:
    fast, nets = compressed("rows", epochs=20)
    test = KINDS["rows"][1]
    control = eb.compress(
        [nets[0], copy.deepcopy(nets[0])], test[0], test, budget=9.0, epochs=20, quiet=True, source="frozen"
    )
    found = fast.fidelity(test, members=nets, control=control)
    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(net(test[0]), test[1], reduction="none") for net in (control, fast)
        ]
    gain = losses[0] - losses[1]
    assert found.nll_gain_over_control == pytest.approx(gain.mean().item(), abs=1e-5)
    assert found.nll_gain_over_control_se == pytest.approx(gain.std().item() / 40**0.5, rel=1e-3)
    same = fast.fidelity(test, members=nets, control=fast)
    assert (same.nll_gain_over_control, same.worth_it) == (0.0, False)
    assert fast.fidelity(test[0], members=nets, control=control).nll_gain_over_control is None


def test_every_entry_point_takes_them() -> None:
    fast, nets = compressed("tokens", source="auto", epochs=2)
    test = texts(60, 5)
    assert fast.choices[0].name == "source"
    models = {"one": nets[0], "ensemble": eb.Ensemble(nets), "fast": fast}
    scores = eb.evaluate(models, test, texts(30, 6), ood={"other": without_labels(texts(30, 7))})
    assert [row.macs_ratio for row in scores.rows[:2]] == [1.0, 3.0]
    fidelity = fast.fidelity(test, members=nets)
    assert fidelity.row is not None
    assert fidelity.row.nll == pytest.approx(scores.rows[2].nll)
    loader = [{name: tensor[start : start + 20] for name, tensor in test.items()} for start in (0, 20, 40)]
    assert fast.fidelity(loader, members=nets).row == fidelity.row


def test_costs_and_features_of_named_inputs() -> None:
    net = TextNet().eval()
    inputs = map_inputs(lambda tensor: tensor[:1], without_labels(texts(40, 0)))
    attention = LENGTH * (3 * 16 * 16 + 16 * 16 + 2 * 16 * 32) + 2 * LENGTH * LENGTH * 16
    assert count_macs(net, inputs) == attention + 16 * CLASSES
    assert [feature.name for feature in list_features(net, inputs)][-2:] == ["layer", "head"]


# ------------------------------------------------------------------------------ data


def test_inputs_come_in_many_ways() -> None:
    named = texts(10, 0)
    ids, mask, classes = named.values()
    singles = [{name: tensor[row] for name, tensor in named.items()} for row in range(10)]
    plain = [{name: tensor[row].tolist() for name, tensor in named.items()} for row in range(10)]
    for data in (named, (without_labels(named), classes), [named], singles, plain):
        found = collect(data)
        assert isinstance(found, eb.data.Examples)
        assert found.labels is not None
        assert found.labels.equal(classes)
        assert _tiny.same(dict(found.inputs), without_labels(named))  # type: ignore[arg-type]
    ordered = torch.utils.data.TensorDataset(ids, mask, classes)
    batches = torch.utils.data.DataLoader(ordered, batch_size=4)
    for data in (((ids, mask), classes), (ids, mask, classes), ordered, batches, list(ordered)):
        found = collect(data)
        assert found.labels is not None
        assert found.labels.equal(classes)
        assert [
            tensor.equal(own) for tensor, own in zip(tensors_of(found.inputs), (ids, mask), strict=True)
        ] == [True] * 2
    for data in ((ids, mask), ((ids, mask), None)):
        assert len(tensors_of(collect(data).inputs)) == 2
        assert collect(data).labels is None
    rows = torch.rand(10, 4)
    for data in ((rows, classes), list(zip(rows, classes, strict=True)), {"x": rows, "y": classes}):
        found = collect(data)
        assert found.inputs.equal(rows)  # type: ignore[union-attr]
        assert found.labels is not None


def test_only_what_has_something_between_is_mixed() -> None:
    tokens = without_labels(texts(8, 0))
    mix = Augment(mixup=0.4)
    assert augment_inputs(mix, tokens, _tiny.generator(0))[0] is tokens
    near, far = two_images(8, 0)
    found, _ = augment_inputs(mix, (near, far), _tiny.generator(0))
    shares = [
        ((new - old.roll(1, 0)) / (old - old.roll(1, 0))).flatten(1).median(1).values
        for new, old in zip(tensors_of(found), (near, far), strict=True)
    ]
    assert shares[0].allclose(shares[1], atol=1e-3)
    images = torch.rand(8, 3, 4, 4)
    assert tensors_of(augment_inputs(mix, images, _tiny.generator(0))[0])[0].equal(
        mix(images, _tiny.generator(0))
    )


@pytest.mark.parametrize("key", ["coarse_label", "Class", "my_targets", "category"])
def test_labels_under_other_keys_are_not_dropped(key: str) -> None:
    entry = {"image": torch.rand(4, 1, 4, 4), key: labels(4)}
    with pytest.raises(ValueError, match=f"{key}.*fine_label"):
        collect(entry, "val")
    assert collect(entry, "train", labelled=False).labels is None
    renamed = collect({"image": entry["image"], "fine_label": entry[key]}).labels
    assert renamed is not None
    assert renamed.equal(labels(4))


@pytest.mark.parametrize("classes", [["cat", "dog"], ("cat", "dog")])
def test_names_of_classes_are_diagnosed(classes: Any) -> None:
    import numpy as np

    images = torch.rand(2, 1, 4, 4)
    held = np.array(classes)
    for data in ((images, classes), [(images, classes)], (images, held), {"image": images, "label": classes}):
        with pytest.raises(ValueError, match=r"'cat'.*number of each class"):
            collect(data)
    with pytest.raises(ValueError, match=r"'dog'.*number of each class"):
        collect([(images[0], "dog")])


# ------------------------------------------------------------------------------ Hugging Face, scikit-learn


def berts(count: int) -> list[nn.Module]:
    pytest.importorskip("transformers")
    import_library("transformers")
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=CLASSES,
    )
    nets: list[nn.Module] = []
    for seed in range(count):
        with _tiny.seeded(seed):
            nets.append(BertForSequenceClassification(config))
    return nets


def test_transformers_of_hugging_face(tmp_path: Path) -> None:
    nets = berts(3)
    train, val, test = (texts(count, seed) for seed, count in enumerate((120, 60, 60)))
    for seed, net in enumerate(nets):
        config = eb.FitConfig(epochs=4, batch_size=30, lr=3e-3, seed=seed)
        eb.fit(eb.methods.DeepEnsemble([net]), (without_labels(train), train["labels"]), config)
    fast = eb.compress(nets, train, val, budget=1.6, epochs=2, quiet=True, source="frozen")
    assert fast.feature == "bert.encoder.layer.0"
    found = fast.fidelity(test, members=nets, control=fast)
    assert 1 < found.macs_ratio <= 1.6
    assert (found.nll_gain_over_control, found.worth_it) == (0.0, False)
    fast.save(tmp_path / "model")
    again = eb.load(tmp_path / "model", source=berts(1)[0])
    inputs = without_labels(test)
    with torch.no_grad():
        assert again(**inputs).equal(fast(**inputs))
    few = {name: tensor[:3] for name, tensor in inputs.items()}
    done = eb.export(fast, tmp_path / "model.onnx", to="onnx", example=few)
    assert done.difference <= done.tolerance


def test_a_table_of_scikit_learn(tmp_path: Path) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    rows, classes = map(torch.as_tensor, datasets.load_wine(return_X_y=True))
    rows = ((rows - rows.mean(0)) / rows.std(0)).float()
    order = torch.randperm(len(rows), generator=_tiny.generator(0))
    train, val, test = ((rows[part], classes[part]) for part in order.split([90, 44, 44]))

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))

    nets = members(build)
    for seed, net in enumerate(nets):
        eb.fit(
            eb.methods.DeepEnsemble([net]), train, eb.FitConfig(epochs=10, batch_size=30, lr=1e-2, seed=seed)
        )
    fast = eb.compress(nets, train[0], val, budget=4.0, epochs=5, quiet=True, source="frozen")
    found = fast.fidelity(test, members=nets)
    assert found.row is not None
    with torch.no_grad():
        expected = nn.functional.cross_entropy(fast(test[0]), test[1]).item()
        agreement = (fast(test[0]).argmax(1) == eb.Ensemble(nets)(test[0]).argmax(1)).double().mean().item()
    assert found.row.nll == pytest.approx(expected, abs=1e-5)
    assert found.agreement == pytest.approx(agreement)
    assert found.ensemble_macs_ratio == 3
    fast.save(tmp_path / "model")
    assert fast.image_shape == (13,)
    with torch.no_grad():
        assert eb.load(tmp_path / "model", source=build())(test[0]).equal(fast(test[0]))
        with pytest.raises(ValueError, match=r"\(44, 12\).*\(B, 13\)"):
            fast(test[0][:, 1:])
    done = eb.export(fast, tmp_path / "model.onnx", to="onnx", example=test[0])
    assert done.difference <= done.tolerance
