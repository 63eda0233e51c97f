"""`ensbridge compress`, `fidelity` and `evaluate` with members and data by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ensbridge as eb
from _named import CLASSES, TIMM, class_folders, hugging_face, pixels, png, run, weights
from ensbridge.data.image_parts import ImagePart, open_parts
from ensbridge.data.loader import collect
from ensbridge.deploy.batch import decode_image
from ensbridge.deploy.members import Member, open_member
from ensbridge.experiments import named as by_name
from ensbridge.experiments.named import evaluate_named
from ensbridge.models.named import NamedNetwork
from ensbridge.utils.extras import missing

EXTRAS = ("timm", "torchvision", "transformers", "parquet", "datasets", "hub")
pytestmark = pytest.mark.skipif(bool(missing(*EXTRAS)), reason=missing(*EXTRAS))


def decode(content: bytes) -> torch.Tensor:
    return decode_image(content, (3, 32, 32))


# ------------------------------------------------------------------------------ data


def rows(count: int = 12) -> list[dict[str, Any]]:
    return [{"image": {"bytes": png(n), "path": None}, "label": n % 3} for n in range(count)]


def expected(count: int = 12) -> torch.Tensor:
    return torch.stack([torch.from_numpy(pixels(n)).permute(2, 0, 1) for n in range(count)])


def test_the_same_images_come_from_parquet_a_saved_set_an_npz_and_folders(tmp_path: Path) -> None:
    import datasets
    import pyarrow
    from pyarrow import parquet

    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=list(CLASSES)))
    whole = datasets.Dataset.from_list(rows(), features=features)
    whole.to_parquet(tmp_path / "all.parquet")
    datasets.DatasetDict(train=whole, validation=whole.select([0])).save_to_disk(tmp_path / "saved")
    (tmp_path / "split").mkdir()
    table = pyarrow.Table.from_pylist(
        [{"image": row["image"]["bytes"], "label": CLASSES[row["label"]]} for row in rows()]
    )
    parquet.write_table(table.slice(0, 5), tmp_path / "split" / "train-00000-of-00002.parquet")
    parquet.write_table(table.slice(5), tmp_path / "split" / "train-00001-of-00002.parquet")
    images = np.stack([pixels(n) for n in range(12)])
    np.savez(tmp_path / "set.npz", images=images, labels=np.arange(12) % 3)
    np.savez(tmp_path / "bare.npz", images=images)
    for name, part, named in (
        ("all.parquet", "all", True),
        ("saved", "train", True),
        ("split", "train", True),
        ("set.npz", "all", False),
    ):
        found = open_parts(str(tmp_path / name), decode)[part]
        data = collect(found.data)
        assert data.images.equal(expected()), name
        assert data.labels is not None
        assert data.labels.tolist() == [n % 3 for n in range(12)]
        assert found.class_names == (CLASSES if named else None)
        held = collect(found.hold_out()[1].data)
        assert held.images.equal(expected()[[9]])
    assert open_parts(str(tmp_path / "bare.npz"), decode)["all"].labels is None
    assert set(open_parts(str(tmp_path / "saved"), decode)) == {"train", "val"}


def test_folders_have_labels_by_class_or_none_and_follow_the_members_names(tmp_path: Path) -> None:
    class_folders(tmp_path / "a" / "train", 2)
    class_folders(tmp_path / "a" / "validation", 1)
    parts = open_parts(str(tmp_path / "a"), decode)
    assert {name: (len(part), part.labels) for name, part in parts.items()} == {
        "train": (6, (0, 0, 1, 1, 2, 2)),
        "val": (3, (0, 1, 2)),
    }
    turned = parts["train"].in_order_of(["Cat", "ant", "bee"])
    assert (turned.labels, turned.class_names) == ((1, 1, 2, 2, 0, 0), ("Cat", "ant", "bee"))
    same = parts["train"].in_order_of(["Ant", "BEE", "cat"])
    assert (same.labels, same.class_names) == ((0, 0, 1, 1, 2, 2), ("Ant", "BEE", "cat"))
    some = parts["train"].in_order_of(["dog", "cat", "bee", "ant"])
    assert some.labels == (3, 3, 2, 2, 1, 1)
    flat = open_parts(str(tmp_path / "a" / "train" / "ant"), decode)["all"]
    assert flat.labels is None
    assert collect(flat.data).images.shape == (2, 3, 32, 32)


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["x", "y", "z"], r"ant, bee, cat.*'ant' is none.*x, y, z"),
        (["ant", "bee", "cow"], "'cat' is none"),
        (["ant", "bee"], "'cat' is none"),
        (["ant", "bee", "cat", "Cat"], "'cat' is the name of several"),
        ([str(n) for n in range(9)], r"9 \(0, 1, 2, 3, 4, …\)"),
    ],
)
def test_classes_that_the_model_has_not_are_refused(names: list[str], named: str) -> None:
    part = ImagePart(eb.data.ImageSet(expected(3)), (0, 1, 2), CLASSES)
    with pytest.raises(ValueError, match=named):
        part.in_order_of(names)


@pytest.mark.parametrize("own", [CLASSES, None])
@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_of_no_class_is_refused(label: int, own: tuple[str, ...] | None) -> None:
    part = ImagePart(eb.data.ImageSet(expected(3)), (0, label, 2), own)
    for names in (CLASSES, ("bee", "cat", "ant")):
        with pytest.raises(ValueError, match=f"label {label}"):
            part.in_order_of(names)


@pytest.mark.parametrize("name", ["absent", "empty", "text.parquet", "text.npz", "text.txt", "odd.parquet"])
def test_data_that_cannot_be_read_are_named(name: str, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "empty").mkdir()
    parquet.write_table(pyarrow.table({"x1": [1]}), tmp_path / "odd.parquet")
    if name.startswith("text"):
        (tmp_path / name).write_text("no images")
    with pytest.raises(ValueError, match=name):
        open_parts(str(tmp_path / name), decode)


# ------------------------------------------------------------------------------ commands


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Members and data."""
    folder = tmp_path_factory.mktemp("named")
    weights(folder / "a.safetensors", 0)
    weights(folder / "b.pt", 1)
    hugging_face(folder / "vit", 2, ("cat", "ant", "bee"))
    class_folders(folder / "photos" / "train", 8)
    class_folders(folder / "photos" / "val", 4)
    class_folders(folder / "photos" / "test", 4)
    return folder


@pytest.fixture(scope="module")
def compressed(there: Path) -> Path:
    """A model that the command made of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(there)
        words = (
            f"timm:{TIMM}@a.safetensors timm:{TIMM}@b.pt hf:vit --data photos --test photos/test --size 32"
        )
        more = "--budget 1.6 --epochs 1 --batch 8 --out model --run-dir run --license mit --quiet --json"
        assert run(patch, "compress", *words.split(), *more.split()) == 0
    return there / "model"


def test_compress_writes_a_model_that_needs_no_member_and_no_leave(
    compressed: Path, there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = eb.load(compressed)
    assert isinstance(fast.source, NamedNetwork)
    assert (fast.source.name, fast.class_names, fast.image_shape) == (
        TIMM,
        ("cat", "ant", "bee"),
        (3, 32, 32),
    )
    assert 'license: "mit"' in (compressed / "README.md").read_text()
    assert "split: test" in (compressed / "README.md").read_text()
    assert (there / "run" / "config.json").is_file()
    monkeypatch.chdir(there)
    Image.fromarray(pixels(3)).save(there / "one.png")
    assert run(monkeypatch, "predict", "model", "one.png") == 0
    line = json.loads(capsys.readouterr().out)
    with torch.no_grad():
        best = fast(torch.from_numpy(pixels(3)).permute(2, 0, 1)[None] / 255).argmax().item()
    assert (line["class_index"], line["label"]) == (best, ("cat", "ant", "bee")[int(best)])


def test_fidelity_and_evaluate_take_the_same_names(
    compressed: Path, there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(there)
    names = [f"timm:{TIMM}@a.safetensors", f"timm:{TIMM}@b.pt", "hf:vit"]
    members = [word for name in names for word in ("--members", name)]
    assert (
        run(monkeypatch, "fidelity", "model", *members, "--data", "photos/test", "--size", "32", "--json")
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == 12
    assert found["row"]["nll"] > 0
    assert run(monkeypatch, "evaluate", "hf:vit", "model", "--data", "photos/test") == 0
    out = capsys.readouterr().out
    assert "hf:vit" in out
    assert f"{found['row']['nll']:.3f}" in out  # the model's, by either command


@pytest.mark.parametrize("first", ["hf:cows", f"timm:{TIMM}@a.safetensors,size=32"])
def test_accuracy_on_a_folder_that_lacks_a_class_is_that_of_its_names(
    first: str, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(there)
    names = ("ant", "bee", "cow")
    if not Path("cows").exists():
        hugging_face(Path("cows"), 2, names)
        class_folders(Path("farm"), 6, names[1:])
    scores = evaluate_named([first, "hf:cows"] if first != "hf:cows" else [first], "farm")
    for row in scores.rows:
        member = open_member(row.model)
        files = [(names.index(path.parent.name), path) for path in sorted(Path("farm").glob("*/*.png"))]
        images = torch.stack(
            [decode_image(path.read_bytes(), (3, 32, 32), member.takes) for _, path in files]
        )
        with torch.no_grad():
            outputs = member.net(images / 255)
        best = getattr(outputs, "logits", outputs).argmax(1).tolist()
        right = sum(label == guess for (label, _), guess in zip(files, best, strict=True))
        assert row.acc == pytest.approx(100 * right / len(files))


def test_classes_that_do_not_fit_are_refused_by_evaluate(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(there)
    class_folders(Path("four"), 1, ("a", "b", "c", "d"))
    hugging_face(Path("turned"), 2, ("bee", "cat", "ant"))
    with pytest.raises(ValueError, match=r"4 classes.*3 outputs"):
        evaluate_named([f"timm:{TIMM}@a.safetensors,size=32"], "four")
    with pytest.raises(ValueError, match="'a' is none"):
        evaluate_named([f"timm:{TIMM}@a.safetensors,size=32", "hf:vit"], "four")
    with pytest.raises(ValueError, match=r"hf:turned and hf:vit .*orders"):
        evaluate_named(["hf:vit", "hf:turned"], "photos/test")


def test_a_licence_is_refused_before_anything_is_opened_and_a_members_unusual_one_is_left_out(
    there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(there)
    monkeypatch.setattr(by_name, "open_members", lambda *_: pytest.fail("members were opened"))
    given = ("hf:vit", f"timm:{TIMM}@b.pt", "--data", "photos", "--out", "other", "--quiet")
    assert run(monkeypatch, "compress", *given, "--license", "Apache 2.0") == 2
    assert "'Apache 2.0'" in capsys.readouterr().err
    net = torch.nn.Identity()
    for licence, kept in (("mit", "mit"), ("Apache 2.0", None), (None, None)):
        assert by_name._licence([Member("a", net, "", license=licence)] * 2) == kept
    bases = [Member("a", net, "", base_model=name) for name in ("u/m", "u/n@v1", "/models/x", "vit", None)]
    assert by_name._base_models(bases) == ["u/m", "u/n"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("timm:{}@a.safetensors", "two or more"),
        ("vit timm:{}@a.safetensors --data absent", "absent"),
        ("vit timm:{}@b.pt --data photos/train/ant --source wrong", "wrong"),
        ("vit timm:{}@b.pt --data two", "2 classes"),
        ("vit timm:{}@b.pt --out photos", "photos"),
    ],
)
def test_bad_input_of_compress_is_one_sentence(
    words: str, named: str, there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(there)
    if not Path("two").exists():
        class_folders(Path("two"), 1, ("one", "two"))
    (there / "photos" / "config.json").write_text("{}")
    given = words.format(TIMM).split()
    given += [] if "--data" in words else ["--data", "photos"]
    given += [] if "--out" in words else ["--out", "other"]
    assert run(monkeypatch, "compress", *given, "--quiet") == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
    assert not Path("other").exists()


def test_a_part_is_shuffled_with_its_labels_and_parquet_that_fits_comes_into_memory(tmp_path: Path) -> None:
    class_folders(tmp_path / "a", 6)
    part = open_parts(str(tmp_path / "a"), decode)["all"]
    whole, turned = collect(part.data), collect(part.shuffled().data)
    assert whole.labels is not None
    assert turned.labels is not None
    assert turned.labels.tolist() != whole.labels.tolist()
    pairs = [
        {(label, image.sum().item()) for image, label in zip(data.images, data.labels.tolist(), strict=True)}
        for data in (whole, turned)
    ]  # type: ignore[union-attr]
    assert pairs[0] == pairs[1]
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows()), tmp_path / "set.parquet")
    stream = open_parts(str(tmp_path / "set.parquet"), decode)["all"]
    size = 12 * 3 * 32 * 32
    assert stream.in_memory(size - 1) is stream
    held = stream.in_memory(size)
    assert isinstance(held.data, eb.data.ImageSet)
    assert held.data.images.equal(expected())
    assert held.data.labels is not None
    assert held.data.labels.tolist() == [n % 3 for n in range(12)]
