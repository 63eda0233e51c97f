"""Odd inputs of `predict`: too large, damaged, no regular files, or of odd names; and its folder's record."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from _named import pixels, png, run
from _saving import small
from ensbridge.data.image_io import MOST_PIXELS
from ensbridge.deploy import predict_inputs
from ensbridge.deploy.batch import Entry, Unreadable
from ensbridge.deploy.predict_folder import MANIFEST, UNREADABLE, predict_to_folder
from ensbridge.deploy.predict_inputs import Damaged, open_inputs
from ensbridge.deploy.predictor import BatchPredictor, PredictorConfig
from ensbridge.methods import BridgeConfig
from ensbridge.utils.extras import missing

needs_parquet = pytest.mark.skipif(bool(missing("parquet")), reason=missing("parquet"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd") / "model"
    small(BridgeConfig()).save(folder, image_shape=(3, 8, 8), class_names=("cat", "dog", "bird"))
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with one image."""
    monkeypatch.chdir(tmp_path)
    Path("a.png").write_bytes(png(0, (8, 8)))
    return tmp_path


def write_tar(path: str, count: int = 3) -> None:
    with tarfile.open(path, "w") as archive:
        for number in range(count):
            entry = tarfile.TarInfo(f"{number}.png")
            entry.size = len(png(number, (8, 8)))
            archive.addfile(entry, io.BytesIO(png(number, (8, 8))))


def damaged(path: str) -> str:
    """Why a file of many images is refused."""
    (source,) = open_inputs([path])
    assert isinstance(source, Damaged)
    assert source.path == path
    return source.reason


# ------------------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    "shape", [(1, 2, MOST_PIXELS, 3), (1, 3, 2, MOST_PIXELS), (5, 0, 8, 3), (2, 8, 8, 5)]
)
def test_arrays_of_too_many_or_no_pixels_are_refused_by_their_shape(
    shape: tuple[int, ...], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez("set.npz", images=np.zeros((1, 1, 1, 3), np.uint8))
    header = predict_inputs.Header(shape, np.dtype(np.uint8), False, 128, 0)
    monkeypatch.setattr(predict_inputs, "read_header", lambda *_: header)  # without 200 MB on disk
    assert "set.npz:images" in damaged("set.npz")


def test_contents_are_decoded_as_they_are_read(model: Path) -> None:
    held: list[weakref.ref[np.ndarray]] = []

    def one_by_one() -> Iterator[Entry]:
        for number in range(4):
            assert all(content() is None for content in held)
            yield make(number)

    def make(number: int) -> Entry:
        array = pixels(number, (8, 8)).copy()
        held.append(weakref.ref(array))
        return str(number), array

    outcomes = list(BatchPredictor(str(model), batch=4).outcomes(one_by_one()))
    assert [name for name, _ in outcomes] == ["0", "1", "2", "3"]
    assert len(held) == 4


@needs_parquet
def test_large_groups_of_rows_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"image": png(number, (8, 8))} for number in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), "set.parquet", row_group_size=3)
    (source,) = open_inputs(["set.parquet"])
    assert list(source.read(1, 4)) == [(f"set.parquet#{n}", rows[n]["image"]) for n in (1, 2, 3)]
    size = sum(4 + len(row["image"]) for row in rows[:3])
    monkeypatch.setattr(predict_inputs, "LARGEST_DICTIONARY", size)
    assert not isinstance(open_inputs(["set.parquet"])[0], Damaged)
    monkeypatch.setattr(predict_inputs, "LARGEST_DICTIONARY", size - 1)
    assert f"{size:,}" in damaged("set.parquet")
    monkeypatch.setattr(predict_inputs, "LARGEST_ROW_GROUP", 100)
    assert "group" in damaged("set.parquet")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_large_headers_of_tar_are_refused(kind: bytes, here: Path) -> None:
    entry = tarfile.TarInfo("long")
    entry.type, entry.size = kind, 800 * 2**20
    write_tar("shard.tar")
    whole = Path("shard.tar").read_bytes()
    Path("first.tar").write_bytes(entry.tobuf() + whole)
    Path("later.tar").write_bytes(whole[:1024] + entry.tobuf() + whole[1024:])
    for name in ("first.tar", "later.tar"):
        assert "838,860,800" in damaged(name)


# ------------------------------------------------------------------------------ damage


@pytest.mark.parametrize("name", ["pipe.tar", "pipe.npz", "pipe.parquet", "pipe.png"])
def test_a_pipe_is_refused_at_once(
    name: str, here: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name.endswith("parquet") and missing("parquet"):
        pytest.skip(missing("parquet"))
    os.mkfifo(name)
    assert run(monkeypatch, "predict", model, f"./{name}", "a.png") == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["image"] == "a.png"
    assert captured.err.count("regular") == captured.err.count("\n") == 1


def test_the_images_before_damage_and_other_inputs_are_predicted(
    here: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez("set.npz", images=np.stack([pixels(number, (8, 8)) for number in range(200)]))
    content = bytearray(Path("set.npz").read_bytes())
    content[-300] ^= 1  # among the last pixels; what is looked at on opening is whole
    Path("set.npz").write_bytes(content)
    write_tar("shard.tar")
    Path("cut.tar.gz").write_bytes(gzip.compress(Path("shard.tar").read_bytes())[:200])
    Path("cut.npz").write_bytes(bytes(content[:200]))
    (source,) = open_inputs(["set.npz"])
    entries = list(source.read(0, 200))
    assert [name for name, _ in entries] == [f"set.npz:images#{number}" for number in range(200)]
    assert isinstance(entries[-1][1], Unreadable)
    assert run(monkeypatch, "predict", model, "cut.npz", "set.npz", "cut.tar.gz", "a.png") == 2
    captured = capsys.readouterr()
    read = sum(not isinstance(image, Unreadable) for _, image in entries)
    assert len(captured.out.splitlines()) == read + 1
    assert len(captured.err.splitlines()) == 200 - read + 2
    assert "Traceback" not in captured.err
    assert run(monkeypatch, "predict", model, "a.png", "cut.npz", "--out", "out", "--quiet") == 2
    assert capsys.readouterr().err.count("\n") == 1
    listed = [json.loads(line) for line in Path("out", UNREADABLE).read_text().splitlines()]
    assert [row["image"] for row in listed] == ["cut.npz"]
    rows = [json.loads(line) for line in Path("out/part-000000.jsonl").read_text().splitlines()]
    assert [(row["image"], row["error"]) for row in rows] == [("a.png", None)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("left", [0, 100, 511])
def test_a_shard_that_was_cut_between_two_images_is_named(
    left: int, packed: bool, here: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tar("shard.tar")
    whole = Path("shard.tar").read_bytes()
    with tarfile.open("shard.tar") as archive:
        third = archive.getmembers()[2].offset
    name = "shard.tar.gz" if packed else "shard.tar"

    def write(content: bytes) -> None:
        Path(name).write_bytes(gzip.compress(content) if packed else content)

    write(whole[: third + left])
    images, end = open_inputs([name])
    assert [entry for entry, _ in images.read(0, 9)] == [f"{name}#0.png", f"{name}#1.png"]
    assert isinstance(end, Damaged)
    assert f"{name} has no end behind its 2 images" in end.reason
    if not left:
        assert run(monkeypatch, "predict", model, name, "--out", "out", "--quiet") == 2
        rows = [json.loads(line) for part in sorted(Path("out").glob("part-*")) for line in part.open()]
        assert [row["image"] for row in rows if row["error"] is None] == [f"{name}#0.png", f"{name}#1.png"]
        assert json.loads(Path("out", UNREADABLE).read_text())["image"] == name
    write(whole.rstrip(b"\0") + bytes(-len(whole.rstrip(b"\0")) % 512 + 512))  # zeros, as few as tell the end
    assert [len(source) for source in open_inputs([name])] == [3]


# ------------------------------------------------------------------------------ names


@pytest.mark.parametrize("format", ["jsonl", pytest.param("parquet", marks=needs_parquet)])
def test_odd_names_stop_nothing(
    format: str,
    here: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    latin, absent = os.fsdecode(b"caf\xe9.png"), os.fsdecode(b"caf\xe8.png")
    for name in (latin, "a[0]*.png"):
        Path(name).write_bytes(png(1, (8, 8)))
    names = [
        latin,
        absent,
        "a[0]*.png",
        "[b].png",
        "n" * 300 + ".png",
        "n" * 300 + ".tar",
        "nul\0.png",
        "a.png",
    ]
    lines = io.TextIOWrapper(
        io.BytesIO("".join(f"{name}\n" for name in names).encode(errors="surrogateescape"))
    )
    monkeypatch.setattr("sys.stdin", lines)
    assert run(monkeypatch, "predict", model, "-") == 2
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [row["image"] for row in rows] == ["caf\\xe9.png", "a[0]*.png", "a.png"]
    assert captured.err.count("\n") == 5
    inputs = open_inputs(["-"], [f"{name}\n" for name in names if not name.endswith(".tar")])
    counts = predict_to_folder(PredictorConfig(str(model)), inputs, "out", format=format)  # type: ignore[arg-type]
    assert counts == (7, 4)


@needs_parquet
def test_predictions_below_the_images_are_no_images(
    here: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["predict", model, ".", "--out", "predictions", "--format", "parquet", "--quiet"]
    for _ in range(2):
        assert run(monkeypatch, *command) == 0
    Path("predictions", "b.png").write_bytes(png(1, (8, 8)))
    (files,) = open_inputs(["."])
    assert [name for name, _ in files.read(0, 9)] == ["./a.png", "./predictions/b.png"]


# ------------------------------------------------------------------------------ the folder's record


def test_another_model_or_other_images_of_the_same_names_are_refused(
    here: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tar("shard.tar")
    config, words = PredictorConfig(str(model)), ["a.png", "shard.tar"]
    predict_to_folder(config, open_inputs(words), here / "out")
    assert predict_to_folder(config, open_inputs(words), here / "out") == (4, 0)
    renamed = here / "renamed"
    renamed.mkdir()
    for path in model.iterdir():
        (renamed / path.name).write_bytes(path.read_bytes().replace(b'"cat"', b'"cow"'))
    with pytest.raises(ValueError, match="another model"):
        predict_to_folder(PredictorConfig(str(renamed)), open_inputs(words), here / "out")
    os.utime("shard.tar", ns=(1, 1))
    with pytest.raises(ValueError, match="another list of images"):
        predict_to_folder(config, open_inputs(words), here / "out")
    (here / "elsewhere").mkdir()
    predict_to_folder(config, open_inputs(["a.png"]), here / "one")
    monkeypatch.chdir(here / "elsewhere")
    Path("a.png").write_bytes(png(1, (8, 8)))
    with pytest.raises(ValueError, match="another list of images"):
        predict_to_folder(config, open_inputs(["a.png"]), here / "one")


def test_an_older_record_is_refused_and_one_without_parts_replaced(here: Path, model: Path) -> None:
    out, inputs = here / "out", open_inputs(["a.png"])
    with pytest.raises(ValueError, match="top_k"):
        predict_to_folder(PredictorConfig(str(model), top_k=0), inputs, out)
    assert predict_to_folder(PredictorConfig(str(model), top_k=1), inputs, out) == (1, 0)
    record = json.loads((out / MANIFEST).read_text())
    assert record["top_k"] == 1
    del record["config"]
    (out / MANIFEST).write_text(json.dumps(record))
    with pytest.raises(ValueError, match="older version"):
        predict_to_folder(PredictorConfig(str(model), top_k=1), inputs, out)
