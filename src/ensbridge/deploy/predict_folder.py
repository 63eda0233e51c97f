"""Predictions for any number of images into a folder, part by part: what was done is not done again.

Inputs are cut into parts, whose files are written whole or not at all. A run that was killed, or a worker of
it, does the parts again that have no file; a part has the same rows whoever makes
it, to the rounding of float32 where they have other numbers of threads (Ray gives a worker one).
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ensbridge.deploy.batch import as_text
from ensbridge.deploy.predict_inputs import MANIFEST, AbstractInput, Damaged, Table
from ensbridge.deploy.predictor import BatchPredictor, PredictorConfig
from ensbridge.deploy.saving.folder import find_model
from ensbridge.utils.extras import need
from ensbridge.utils.files import (
    MOST_JSON,
    REMEDY,
    locked,
    open_folder,
    parse_json,
    read_file,
    read_json,
    write_atomically,
)
from ensbridge.utils.progress import Stage, silent

Format = Literal["jsonl", "parquet"]
Engine = Literal["local", "ray"]
PART = 4096  # images in a part: what a killed run may lose
BLOCKS = 1000  # of Ray, which has a cost for each
UNREADABLE = "unreadable.jsonl"
LISTED = ("image", "row", "error")  # what it has of each


@dataclass(frozen=True)
class Part:
    """Some images of an input, and the file for their predictions."""

    source: AbstractInput
    start: int
    stop: int
    path: str

    def write(self, predictor: BatchPredictor, format: Format) -> int:
        """Predict, and write the file; how many images there were."""
        rows = list(predictor.rows(self.source.read(self.start, self.stop)))
        write_atomically(Path(self.path), _encoded(rows, format))
        return len(rows)


def plan_parts(inputs: Sequence[AbstractInput], out: Path, format: Format, size: int = PART) -> list[Part]:
    """All parts of a run, in the order of its inputs."""
    parts: list[Part] = []
    for source in inputs:
        for start in range(0, len(source), size):
            path = out / f"part-{len(parts):06d}.{format}"
            parts.append(Part(*source.cut(start, min(start + size, len(source))), str(path)))
    return parts


def predict_to_folder(
    config: PredictorConfig,
    inputs: Sequence[AbstractInput],
    out: Path | str,
    *,
    format: Format = "jsonl",
    engine: Engine = "local",
    workers: int | None = None,
    part: int = PART,
    progress: Stage = silent,
    worker: type | None = None,
) -> tuple[int, int]:
    """Predict all images of inputs into a folder; how many stand there, and how many could not be read.

    A file of many images that is damaged ends in ValueError once all others are predicted.

    The same call resumes a run that was killed. `engine="ray"` runs parts on `workers` processes of Ray Data,
    on this machine or on the cluster that Ray is connected to, which must see the same files.
    """
    if format not in get_args(Format) or engine not in get_args(Engine):
        raise ValueError(f"format is {format!r}, engine {engine!r}; give jsonl or parquet, local or ray")
    if not any(map(len, inputs)):
        raise ValueError("there are no images to predict; give at least one")
    damaged = [source for source in inputs if isinstance(source, Damaged)]
    if len(damaged) == len(inputs):
        raise ValueError(damaged[0].reason)
    need(*(["parquet"] if format == "parquet" else []), *(["ray"] if engine == "ray" else []))
    folder = open_folder(out)
    with locked(folder):
        parts = plan_parts(inputs, folder, format, part)
        _check_manifest(folder, config, inputs, format, part)
        left = [piece for piece in parts if not Path(piece.path).is_file()]
        count, to_do = sum(map(len, inputs)), sum(piece.stop - piece.start for piece in left)
        advance = progress("predict", count, kind_of(inputs))
        advance(count - to_do)
        if engine == "ray":
            _run_ray(config, left, format, advance, workers, worker or PartWriter)
        else:
            predictor = BatchPredictor.of(config)
            for piece in left:
                advance(piece.write(predictor, format))
        unreadable = list(_unreadable(parts, format))
        text = "".join(f"{json.dumps(row)}\n" for row in unreadable)
        write_atomically(folder / UNREADABLE, text.encode())
    if damaged:
        raise ValueError(f"{as_text(damaged[0].reason)}; all others are predicted in {folder}")
    return count, len(unreadable)


def kind_of(inputs: Sequence[AbstractInput]) -> str:
    """What inputs hold: "images", or "rows"."""
    return next((source.kind for source in inputs if isinstance(source, Table)), "images")


def _check_manifest(
    folder: Path, config: PredictorConfig, inputs: Sequence[AbstractInput], format: str, part: int
) -> None:
    listed = "\0".join(source.identity() for source in inputs)
    digest = hashlib.sha256(listed.encode("utf-8", "surrogateescape")).hexdigest()
    told = {
        name: value
        for name, value in asdict(config).items()
        if name not in ("batch", "device", "allow", "model")
    }
    description = find_model(config.model) / "config.json"
    content = read_file(description, MOST_JSON, REMEDY)
    model = {
        "weights": parse_json(content, str(description)).get("sha256"),
        "config": hashlib.sha256(content).hexdigest(),
    }
    run = json.loads(json.dumps({**model, "inputs": digest, "format": format, "part": part, **told}))
    path = folder / MANIFEST
    if not any(folder.glob("part-*")):  # nothing was predicted yet, as after options that were refused
        write_atomically(path, json.dumps(run, indent=1).encode())
        return
    if not path.exists():
        raise ValueError(f"{folder} holds parts of an unknown run; choose another folder")
    known = read_json(path)
    if "config" not in known:
        raise ValueError(f"{folder} holds predictions of an older version; choose another folder")
    names = {"weights": "model", "config": "model", "inputs": "list of images", "part": "size of parts"}
    for name, value in run.items():
        if known.get(name) != value:
            what = names.get(name, name)
            raise ValueError(f"{folder} holds predictions with another {what}; choose another folder")


class PartWriter:
    """What a worker of Ray does with the parts that it is handed."""

    def __init__(self, config: PredictorConfig, format: Format) -> None:
        self.predictor = BatchPredictor.of(config)
        self.format: Format = format

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[int]]:
        """The images of each part that was written."""
        return {"images": [self.write(pickle.loads(part)) for part in batch["part"]]}

    def write(self, part: Part) -> int:
        """Write one part."""
        return part.write(self.predictor, self.format)


def _run_ray(
    config: PredictorConfig,
    parts: Sequence[Part],
    format: Format,
    advance: Callable[[int], None],
    workers: int | None,
    worker: type,
) -> None:
    """Each part is one row of a data set; a worker that dies is replaced, and its part done again."""
    import ray
    import ray.data

    BatchPredictor.of(config)  # what is wrong with the model is said here, not by a worker
    if not parts:
        return
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)) - 1)
    ray.data.DataContext.get_current().enable_progress_bars = False
    for name in ("ray.data", "ray"):  # whose plans and advice are for its developers
        logging.getLogger(name).setLevel(logging.ERROR)
    rows = [{"part": pickle.dumps(part)} for part in parts]  # of this process's own making
    done = ray.data.from_items(rows, override_num_blocks=min(len(parts), BLOCKS)).map_batches(
        worker,
        fn_constructor_args=[config, format],
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(count, len(parts))),
    )
    for row in done.iter_rows():
        advance(int(row["images"]))


def _encoded(rows: Sequence[dict[str, Any]], format: Format) -> bytes:
    if format == "jsonl":
        return "".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows).encode()
    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=_schema(rows[0])), file)
    return file.getvalue()


def _schema(row: dict[str, Any]) -> Any:
    """The types of a row's columns, the same for all parts whatever is missing in one of them."""
    import pyarrow as pa

    kinds = {"class_index": pa.int64()}
    kinds |= dict.fromkeys(("image", "row", "error", "label", "source_label"), pa.string())
    kinds["top_k"] = pa.list_(pa.struct([("label", pa.string()), ("probability", pa.float64())]))
    return pa.schema([(name, kinds.get(name, pa.float64())) for name in row])


def _unreadable(parts: Sequence[Part], format: Format) -> Iterator[dict[str, str]]:
    for part in parts:
        if format == "jsonl":
            with open(part.path, encoding="utf-8") as file:
                for line in file:
                    if not line.endswith('"error": null}\n'):
                        row = json.loads(line)
                        yield {name: row[name] for name in LISTED if name in row}
        else:
            from pyarrow import parquet

            names = [name for name in parquet.read_schema(part.path).names if name in LISTED]
            table = parquet.read_table(part.path, columns=names)
            yield from (row for row in table.to_pylist() if row["error"] is not None)
