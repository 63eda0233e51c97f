"""`predict` for models that take no images: rows of tables, and tokens with their mask."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import _tiny
import ensbridge as eb
from ensbridge import cli
from ensbridge.deploy import predict_rows
from ensbridge.deploy.batch import Prediction, Unreadable, each_prediction
from ensbridge.deploy.predict_inputs import Damaged, open_inputs
from ensbridge.deploy.predict_rows import rows_of
from ensbridge.deploy.predictor import BatchPredictor
from ensbridge.utils.extras import missing
from ensbridge.utils.inputs import Inputs

needs_parquet = pytest.mark.skipif(bool(missing("parquet")), reason=missing("parquet"))
NETS = """
from torch import nn

class Rows(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))

class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        tokens = self.mix(self.embedding(input_ids)).relu()
        weights = attention_mask[..., None]
        return self.head((tokens * weights).sum(1) / weights.sum(1))

class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.Linear(5, 16), nn.Linear(16, 3)

    def forward(self, left, right):
        import torch
        return self.head(self.mix(torch.cat([left, right], 1)).relu())
"""
ROWS = torch.rand(7, 4, generator=_tiny.generator(0))
IDS = torch.randint(1, 9, (7, 6), generator=_tiny.generator(1))
MASK = (torch.arange(6) < torch.arange(7)[:, None].clamp(1, 6)).long()
TEXTS = {"input_ids": IDS, "attention_mask": MASK}
PAIRS = (ROWS[:, :3].contiguous(), ROWS[:, :2].contiguous())
GIVEN: dict[str, tuple[str, Inputs, str]] = {
    "rows": ("Rows", ROWS, "1"),
    "texts": ("Texts", TEXTS, "mix"),
    "pairs": ("Pairs", PAIRS, "mix"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved model of each kind."""
    folder = tmp_path_factory.mktemp("row-models")
    (folder / "row_nets.py").write_text(NETS, encoding="utf-8")
    sys.path.insert(0, str(folder))
    import row_nets  # pyright: ignore[reportMissingImports]

    for kind, (build, inputs, feature) in GIVEN.items():
        nets = []
        for seed in range(2):
            with _tiny.seeded(seed):
                nets.append(getattr(row_nets, build)())
        fast = eb.compress(
            nets, inputs, feature=feature, budget=99.0, epochs=1, quiet=True, source="frozen", seed=1
        )
        fast.save(folder / kind, build=f"row_nets:{build}", class_names=("low", "middle", "high"))
    return {kind: folder / kind for kind in GIVEN}


def run(*words: object) -> int:
    """The exit code of a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ensbridge", *map(str, words), "--allow", "row_nets"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)


def expected(models: Mapping[str, Path], kind: str) -> list[Prediction]:
    fast = eb.load(models[kind], allow=["row_nets"])
    return [prediction for prediction in each_prediction(fast, GIVEN[kind][1]) if prediction is not None]


def csv_rows(path: Path) -> None:
    lines = [",".join(map(repr, row)) for row in ROWS.double().tolist()]
    path.write_text("\n".join(lines), encoding="utf-8")


def csv_with_header(path: Path) -> None:
    lines = [",".join([*map(repr, row[:2]), "2", *map(repr, row[2:])]) for row in ROWS.double().tolist()]
    path.write_text("a,b,label,c,d\n" + "\r\n\r\n".join(lines) + "\n", encoding="utf-8-sig")


def npz(**arrays: Tensor) -> Callable[[Path], None]:
    return lambda path: np.savez_compressed(path, **{name: part.numpy() for name, part in arrays.items()})


def parquet(**columns: Tensor) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({name: part.tolist() for name, part in columns.items()})
        pyarrow.parquet.write_table(table, path, row_group_size=3)

    return write


FILES: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "CSV": ("rows", "set.csv", csv_rows),
    "CSV with names and labels": ("rows", "set.csv", csv_with_header),
    "npz": ("rows", "set.npz", npz(anything=ROWS, labels=torch.arange(7))),
    "texts in npz": ("texts", "set.npz", npz(**TEXTS, labels=torch.arange(7))),
    "pairs in npz": ("pairs", "set.npz", npz(input_1=PAIRS[1], input_0=PAIRS[0])),
    "columns": ("rows", "set.parquet", parquet(**{f"c{n}": ROWS[:, n] for n in range(4)})),
    "a column of lists": ("rows", "set.parquet", parquet(features=ROWS, label=torch.arange(7))),
    "texts in parquet": ("texts", "set.parquet", parquet(row=torch.arange(7), **TEXTS)),
}


@pytest.mark.parametrize("way", [pytest.param(way, marks=needs_parquet) for way in FILES])
def test_rows_of_a_file_are_predicted_as_the_model_does(
    way: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, name, write = FILES[way]
    write(path := tmp_path / name)
    assert run("predict", models[kind], path, "--batch-size", 3) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.pop("row") for row in printed] == [f"{path}#{number}" for number in range(7)]
    for row, prediction in zip(printed, expected(models, kind), strict=True):
        for key, value in prediction.to_row("").items():
            if key != "image":
                assert row[key] == (pytest.approx(value, abs=1e-6) if isinstance(value, float) else value)


@needs_parquet
@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_rows_are_written_part_by_part_and_a_bad_one_stops_nothing(
    format: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    npz(rows=ROWS)(tmp_path / "in" / "b.npz")
    (tmp_path / "in" / "a.csv").write_text("1,2,3,4\n1,,3,4\n1,2,3\n1e40,2,3,4\n0,0,0,0\n", encoding="utf-8")
    words = ["predict", models["rows"], tmp_path / "in", "--out", tmp_path / "out", "--format", format]
    for _ in range(2):  # the second has nothing to do
        assert run(*words) == 0
    said = capsys.readouterr()
    assert "12 rows, 9 predicted" in said.out + said.err
    rows: list[dict[str, Any]] = []
    for part in sorted((tmp_path / "out").glob(f"part-*.{format}")):
        if format == "jsonl":
            rows += map(json.loads, part.read_text(encoding="utf-8").splitlines())
        else:
            import pyarrow.parquet

            rows += pyarrow.parquet.read_table(part).to_pylist()
    lost = [row["row"].rpartition("/")[2] for row in rows if row["error"]]
    assert lost == ["a.csv#1", "a.csv#2", "a.csv#3"]
    listed = (tmp_path / "out" / "unreadable.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["row"].rpartition("/")[2] for line in listed] == lost
    found = [row["probability"] for row in rows[5:]]
    assert found == pytest.approx([each.probability for each in expected(models, "rows")], abs=1e-6)


@needs_parquet
def test_sequences_may_have_any_length_and_an_unknown_token_stops_nothing(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow
    import pyarrow.parquet

    ids = [[1, 2, 3], [4, 5], [6, 99], [7, 8], None]
    table = {"input_ids": ids, "attention_mask": [row and [1] * len(row) for row in ids]}
    pyarrow.parquet.write_table(pyarrow.table(table), path := tmp_path / "set.parquet")
    assert run("predict", models["texts"], path) == 2
    said = capsys.readouterr()
    rows = {int(row["row"].rpartition("#")[2]): row for row in map(json.loads, said.out.splitlines())}
    assert list(rows) == [0, 1, 3]
    assert "set.parquet#2" in said.err
    assert "set.parquet#4" in said.err
    fast = eb.load(models["texts"], allow=["row_nets"])
    for number, row in rows.items():
        one = torch.tensor([ids[number]])
        (alone,) = each_prediction(fast, {"input_ids": one, "attention_mask": torch.ones_like(one)})
        assert alone is not None
        assert row["probability"] == pytest.approx(alone.probability, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "name", "content", "named"),
    [
        ("rows", "set.csv", "1,2,3\n", r"set\.csv has 3 columns.*\(4,\)"),
        ("rows", "set.csv", "", r"set\.csv is empty"),
        ("rows", "set.csv", "a,a,b,c\n1,2,3,4\n", r"set\.csv .*one name"),
        ("rows", "set.png", "1,2,3,4\n", r"set\.png is no CSV.*\(4,\)"),
        ("rows", "gone.csv", None, r"gone\.csv .*does not exist"),
        ("rows", "set.csv", "a,b,c,d\n", r"set\.csv has names of columns and no rows"),
        ("rows", "set.csv", "1;2;3;4\n5;6;7;8\n", r"set\.csv has one column.*commas"),
        ("texts", "set.csv", "input_ids\n1\n", r"set\.csv has no attention_mask"),
        ("rows", "set.npz", "no archive", r"set\.npz .*zip file"),
    ],
)
def test_what_holds_no_rows_for_the_model_is_named(
    kind: str,
    name: str,
    content: str | None,
    named: str,
    models: dict[str, Path],
    tmp_path: Path,
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    (source,) = open_inputs([str(tmp_path / name)], specs=rows_of(str(models[kind]), None))
    assert isinstance(source, Damaged)
    with pytest.raises(ValueError, match=named):
        raise ValueError(source.reason)


def test_numbers_of_another_kind_are_named(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    npz(input_ids=IDS + 0.5, attention_mask=MASK)(tmp_path / "set.npz")
    npz(rows=ROWS[:, None])(tmp_path / "deep.npz")
    assert run("predict", models["texts"], tmp_path / "set.npz") == 2
    assert run("predict", models["rows"], tmp_path / "deep.npz") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "not whole" in said.err
    assert "(1, 4)" in said.err
    assert run("predict", models["rows"], tmp_path / "deep.npz", "--mean", "0.5") == 2


def test_a_long_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ensbridge.utils.input_specs import InputSpec

    monkeypatch.setattr(predict_rows, "LONGEST_LINE", 64)
    (tmp_path / "set.csv").write_text("1,2\n" + "3" * 64, encoding="utf-8")
    (source,) = open_inputs([str(tmp_path / "set.csv")], specs=(InputSpec((2,), "float32"),))
    assert isinstance(source, Damaged)
    assert "64 bytes" in source.reason


@pytest.mark.parametrize("kind", GIVEN)
def test_the_predictor_takes_a_column_for_each_input(kind: str, models: dict[str, Path]) -> None:
    predictor = BatchPredictor(str(models[kind]), allow=["row_nets"], column="features")
    inputs: Any = GIVEN[kind][1]
    if isinstance(inputs, Tensor):
        inputs = {"features": inputs}
    elif isinstance(inputs, tuple):
        inputs = {f"input_{number}": part for number, part in enumerate(inputs)}
    batch = predictor({name: part.numpy() for name, part in inputs.items()})
    found = [each.probability for each in expected(models, kind)]
    assert batch["probability"].tolist() == pytest.approx(found, abs=1e-6)
    assert set(batch) == {*inputs, *predictor.columns} - {"row"}
    with pytest.raises(ValueError, match=next(iter(inputs))):
        predictor({"other": np.zeros(2)})


@pytest.mark.parametrize(
    ("content", "rows", "unreadable"),
    [
        ('1,2,3,4\n1,2,"3,4\n5,6,7,8\n', [[1, 2, 3, 4], [5, 6, 7, 8]], [1]),  # a quote that is not closed
        ("1,2,3,4\n5,6,7,8\n1,2,3,4,5\n", [[1, 2, 3, 4], [5, 6, 7, 8]], [2]),  # as decimal commas have it
        (".1,NA,.3,.4\n5,6,7,8\n", [[5, 6, 7, 8]], [0]),  # a first row that lacks a number is no header
        ("0,1,2,3\n5,6,7,8\n", [[5, 6, 7, 8]], []),  # a data frame's without names
        ("0,1,2,3,label\n5,6,7,8,1\n", [[5, 6, 7, 8]], []),
        ('"1","2","3","4"\n', [[1, 2, 3, 4]], []),
    ],
)
def test_a_line_is_a_row_and_a_bad_one_leaves_the_others_alone(
    content: str, rows: list[list[float]], unreadable: list[int], models: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "set.csv"
    path.write_text(content, encoding="utf-8")
    (source,) = open_inputs([str(path)], specs=rows_of(str(models["rows"]), None))
    outcomes = [content for _, content in source.read(0, len(source))]
    assert [index for index, row in enumerate(outcomes) if isinstance(row, Unreadable)] == unreadable
    good = [row for row in outcomes if isinstance(row, tuple) and not isinstance(row, Unreadable)]
    assert [row[0].tolist() for row in good] == rows


@pytest.mark.parametrize("kind", ["csv", pytest.param("parquet", marks=needs_parquet), "npz"])
def test_any_part_of_a_file_is_read_alone(
    kind: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict_rows, "MARK_EVERY", 2)
    monkeypatch.setattr(predict_rows, "READ_TOGETHER", 2)
    path = tmp_path / f"set.{kind}"
    if kind == "parquet":
        import pyarrow as pa
        from pyarrow import parquet

        columns = {name: ROWS[:, index].tolist() for index, name in enumerate("abcd")}
        parquet.write_table(pa.table(columns), path, row_group_size=3)
    else:
        (csv_rows if kind == "csv" else npz(x=ROWS))(path)
    (source,) = open_inputs([str(path)], specs=rows_of(str(models["rows"]), None))
    for start in range(len(ROWS)):
        for stop in range(start, len(ROWS) + 1):
            read = list(source.read(start, stop))
            assert [name for name, _ in read] == [f"{path}#{number}" for number in range(start, stop)]
            for (_, row), expected_row in zip(read, ROWS[start:stop].tolist(), strict=True):
                assert isinstance(row, tuple)
                assert not isinstance(row, Unreadable)
                assert row[0].tolist() == pytest.approx(expected_row, abs=1e-7)


@needs_parquet
def test_parquet_that_would_take_much_memory_is_refused(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    monkeypatch.setattr(predict_rows, "LARGEST_ROW_GROUP", 2**20)
    parquet.write_table(pa.table({"x": [[0.5] * 40_000] * 4}), path := tmp_path / "set.parquet")
    assert path.stat().st_size < 2**14
    (source,) = open_inputs([str(path)], specs=rows_of(str(models["rows"]), None))
    assert isinstance(source, Damaged)
    assert "1,048,576 bytes" in source.reason


def test_numbers_that_a_type_cannot_hold_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    specs = rows_of(str(models["texts"]), None)
    assert specs is not None
    narrow = tuple(replace(spec, dtype="int8") for spec in specs)
    for value in (300.0, float("nan"), 0.5):
        outcome = predict_rows._example("row", (np.full(6, value), np.ones(6)), narrow)
        assert isinstance(outcome, str)
