"""Many images into a folder: every kind of input, each image once, whatever is killed or unreadable."""

from __future__ import annotations

import builtins
import io
import json
import os
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ensbridge as eb
from _named import pixels, png, run
from _saving import small
from ensbridge.deploy import predict_folder
from ensbridge.deploy.predict_folder import MANIFEST, UNREADABLE, PartWriter, predict_to_folder
from ensbridge.deploy.predict_inputs import Files, open_inputs
from ensbridge.deploy.predictor import BatchPredictor, PredictorConfig
from ensbridge.methods import BridgeConfig
from ensbridge.utils.extras import missing

NAMES = ("cat", "dog", "bird")
needs_parquet = pytest.mark.skipif(bool(missing("parquet")), reason=missing("parquet"))


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and seven images of 8 × 8 in each kind of input."""
    folder = tmp_path_factory.mktemp("many")
    small(BridgeConfig()).save(folder / "model", image_shape=(3, 8, 8), class_names=NAMES)
    (folder / "photos" / "deep").mkdir(parents=True)
    with tarfile.open(folder / "shard.tar", "w") as archive:
        for number in range(7):
            content = png(number, (8, 8))
            path = folder / "photos" / ("deep" if number > 3 else "") / f"{number}.png"
            path.write_bytes(content)
            for name in (f"{number}.png", f"{number}.cls"):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    np.savez(folder / "set.npz", test_images=np.stack([pixels(number, (8, 8)) for number in range(7)]), y=[1])
    return folder


@pytest.fixture(scope="module")
def expected(there: Path) -> list[dict[str, Any]]:
    """What the model itself says of the images."""
    fast = eb.load(there / "model")
    images = torch.stack([torch.from_numpy(pixels(number, (8, 8))).permute(2, 0, 1) for number in range(7)])
    with torch.no_grad():
        probabilities = fast(images / 255).softmax(-1)
    return [{"class_index": int(row.argmax()), "probability": float(row.max())} for row in probabilities]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """All rows of the parts, in their order."""
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("part-*")):
        if path.suffix == ".jsonl":
            rows += [json.loads(line) for line in path.read_text().splitlines()]
        else:
            from pyarrow import parquet

            rows += parquet.read_table(path).to_pylist()
    return rows


def check(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["class_index"] for row in rows] == [row["class_index"] for row in expected]
    assert [row["probability"] for row in rows] == pytest.approx([row["probability"] for row in expected])
    assert len({row["image"] for row in rows}) == len(rows)


@needs_parquet
@pytest.mark.parametrize("source", ["photos", "photos/**/*.png", "-", "shard.tar", "set.npz", "set.parquet"])
def test_every_kind_of_input_has_the_same_predictions(
    source: str,
    there: Path,
    expected: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import pyarrow
    from pyarrow import parquet

    monkeypatch.chdir(there)
    values = [{"image": {"bytes": png(number, (8, 8)), "path": None}} for number in range(7)]
    parquet.write_table(pyarrow.Table.from_pylist(values), "set.parquet", row_group_size=3)
    lines = "".join(f"{path}\n" for path in sorted(map(str, Path("photos").rglob("*.png"))))
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    monkeypatch.setattr(
        predict_folder.predict_to_folder,
        "__kwdefaults__",
        {**predict_folder.predict_to_folder.__kwdefaults__, "part": 2},
    )
    command = ["predict", "model", source, "--batch", 3, "--top-k", 2]
    assert run(monkeypatch, *command, "--out", tmp_path / "out", "--format", "parquet") == 0
    capsys.readouterr()
    rows = read_rows(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("part-*"))) == 4  # of two images each, but for the last
    check(rows, expected)
    assert all(
        len(row["top_k"]) == 2 and row["top_k"][0]["probability"] == row["probability"] for row in rows
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert run(monkeypatch, *command) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for row in rows:
        assert row.pop("error") is None
    assert [row["image"] for row in printed] == [row["image"] for row in rows]
    check(printed, expected)


def test_a_killed_run_resumes_and_each_image_stands_once(
    there: Path, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    config, inputs = PredictorConfig(str(there / "model")), open_inputs([str(there / "photos")])
    out = tmp_path / "out"
    child = os.fork()
    if not child:  # which ends itself after its second part
        write = predict_folder.write_atomically
        written = []

        def killed(path: Path, content: bytes) -> None:
            write(path, content)
            written.append(path)
            if len(written) == 3:  # the manifest and two parts
                os.kill(os.getpid(), signal.SIGKILL)

        predict_folder.write_atomically = killed
        predict_to_folder(config, inputs, out, part=2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in out.glob("part-*")}
    assert len(before) == 2
    assert predict_to_folder(config, inputs, out, part=2) == (7, 0)
    check(read_rows(out), expected)
    assert {path: path.stat().st_mtime_ns for path in before} == before  # what was done is not done again
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [".lock", MANIFEST, UNREADABLE, *(f"part-{number:06d}.jsonl" for number in range(4))]
    )


def test_unreadable_images_are_listed_and_not_fatal(there: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_text("no image")
    paths = [str(there / "photos" / "0.png"), str(tmp_path / "bad.png"), str(tmp_path / "none.png")]
    for format in ("jsonl", *(() if missing("parquet") else ("parquet",))):
        out = tmp_path / format
        found = predict_to_folder(PredictorConfig(str(there / "model")), [Files(paths)], out, format=format)  # type: ignore[arg-type]
        assert found == (3, 2)
        assert [row["image"] for row in read_rows(out)] == paths
        listed = [json.loads(line) for line in (out / UNREADABLE).read_text().splitlines()]
        assert [row["image"] for row in listed] == paths[1:]
        assert all(row["image"] in row["error"] for row in listed)


def test_a_folder_of_another_run_is_refused(there: Path, tmp_path: Path) -> None:
    model, photos = str(there / "model"), open_inputs([str(there / "photos")])
    predict_to_folder(PredictorConfig(model), photos, tmp_path)
    small(BridgeConfig(), BridgeConfig()).save(tmp_path / "other", image_shape=(3, 8, 8))
    others = {
        "model": (PredictorConfig(str(tmp_path / "other")), photos, "jsonl"),
        "images": (PredictorConfig(model), photos + photos, "jsonl"),
        "top_k": (PredictorConfig(model, top_k=2), photos, "jsonl"),
    }
    for named, (config, inputs, format) in others.items():
        with pytest.raises(ValueError, match=named):
            predict_to_folder(config, inputs, tmp_path, format=format)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "words",
    [
        ["absent.parquet"],
        ["text.npz"],
        ["text.tar"],
        ["*.gif"],
        ["a.png", "--out", "out", "--format", "csv"],
        ["a.png", "--out", "out", "--engine", "spark"],
        ["a.png", "--engine", "ray"],
        ["a.png", "--top-k", "0"],
        ["a.png", "--batch", "0"],
    ],
)
def test_bad_input_of_predict_is_one_sentence(
    words: list[str],
    there: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("text.npz", "text.tar"):
        Path(name).write_text("no images")
    Path("a.png").write_bytes(png(0, (8, 8)))
    assert run(monkeypatch, "predict", there / "model", *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


# ------------------------------------------------------------------------------ Ray


@pytest.fixture(scope="module")
def two_workers() -> Any:
    if missing("ray"):
        pytest.skip(missing("ray"))
    import ray

    print_of_python = builtins.print  # Ray puts its own in its place and leaves it there
    here = Path(__file__).parents[1]
    paths = os.pathsep.join([str(Path(eb.__file__).parents[1]), str(here)])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )
    yield ray
    ray.shutdown()
    builtins.print = print_of_python


def test_ray_has_the_rows_of_local_though_a_worker_is_killed(
    two_workers: Any, there: Path, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    config, inputs = (
        PredictorConfig(str(there / "model"), top_k=3),
        open_inputs([str(there / "photos"), str(there / "shard.tar")]),
    )
    died = tmp_path / "died"

    class Mortal(PartWriter):
        def write(self, part: Any) -> int:
            if part.path.endswith("000001.jsonl") and not died.exists():
                died.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            return super().write(part)

    found = predict_to_folder(
        config, inputs, tmp_path / "ray", engine="ray", workers=2, part=4, worker=Mortal
    )
    assert died.exists()
    assert found == predict_to_folder(config, inputs, tmp_path / "local", part=4) == (14, 0)
    names = sorted(path.name for path in (tmp_path / "local").glob("part-*"))
    assert len(names) == 4
    for name in names:
        assert (tmp_path / "ray" / name).read_text() == (tmp_path / "local" / name).read_text()
    check(read_rows(tmp_path / "ray")[:7], expected)


def test_the_predictor_serves_a_data_set_of_ray(
    two_workers: Any, there: Path, expected: list[dict[str, Any]]
) -> None:
    import ray.data

    contents = [{"id": number, "image": png(number, (8, 8)) if number < 7 else b"?"} for number in range(8)]
    data = ray.data.from_items(contents, override_num_blocks=2)
    made = data.map_batches(
        BatchPredictor, fn_constructor_args=[str(there / "model")], batch_size=4, concurrency=1
    )
    rows = sorted(made.take_all(), key=lambda row: row["id"])
    assert [row["class_index"] for row in rows[:7]] == [row["class_index"] for row in expected]
    assert [row["error"] is None for row in rows] == [True] * 7 + [False]
