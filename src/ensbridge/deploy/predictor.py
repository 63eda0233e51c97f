"""A saved model as an object that predicts batches: in a loop, in a pool of processes, in Ray Data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ensbridge.deploy.batch import (
    BATCH,
    Content,
    Entry,
    Pixels,
    Prediction,
    Unreadable,
    predict_entries,
)
from ensbridge.deploy.export import image_like
from ensbridge.deploy.predict_rows import input_names, predict_rows, row_specs
from ensbridge.deploy.saving import load
from ensbridge.utils.devices import find_device


@dataclass(frozen=True)
class PredictorConfig:
    """A saved model and how it is run: all that another process needs to do the same."""

    model: str
    image_shape: tuple[int, ...] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    allow: tuple[str, ...] = ()
    device: str = "cpu"
    batch: int = BATCH
    top_k: int | None = None


class BatchPredictor:
    """Predicts batches of images with a saved model, as `ray.data.Dataset.map_batches` wants it.

    A batch is a mapping with the column `image`: the contents of image files (bytes, or Hugging Face's
    {"bytes": …}) or uint8 pixels. For a model that takes no images it has a column for each input, `column`
    where that has no name. It is returned with the columns that `ensbridge predict` prints, and
    `error` where an image could not be read; other columns of the batch stay as they are.

    >>> import io
    >>> from PIL import Image
    >>> Image.new("RGB", (32, 32)).save(file := io.BytesIO(), "PNG")
    >>> predictor = BatchPredictor("zoo:cifar10", top_k=2)
    >>> batch = predictor({"image": np.array([file.getvalue(), b"no image"], dtype=object)})
    >>> batch["label"][0] is not None, len(batch["top_k"][0]), batch["error"][1] is not None
    (True, 2, True)

    With Ray: `data.map_batches(BatchPredictor, fn_constructor_args=["model"], batch_size=64, concurrency=2)`.
    """

    def __init__(
        self,
        model: str,
        *,
        image_shape: Sequence[int] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        allow: Collection[str] = (),
        device: str = "cpu",
        batch: int = BATCH,
        top_k: int | None = None,
        column: str = "image",
    ) -> None:
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is {top_k}; give how many classes, 1 or more")
        if batch < 1:
            raise ValueError(f"batch is {batch}; give how many images, 1 or more")
        self.fast = load(model, allow=allow)
        shape = self.fast.image_shape if image_shape is None else image_shape
        dtype = next((each.dtype for each in self.fast.source.parameters()), torch.float32)
        self.specs = row_specs(shape, self.fast.input_specs, dtype)
        if self.specs is None:
            self.shape = tuple(image_like(self.fast, model, image_shape).shape[1:])
            self.pixels = Pixels.of(self.fast, mean, std)
        elif mean is not None or std is not None:
            raise ValueError("mean and std are of images, and this model takes none; leave them out")
        self.fast.to(find_device(device))
        self.batch, self.top_k, self.column = batch, top_k, column

    @classmethod
    def of(cls, config: PredictorConfig) -> BatchPredictor:
        """The predictor that a configuration describes."""
        return cls(**asdict(config))

    def outcomes(self, entries: Iterable[Entry]) -> Iterator[tuple[str, Prediction | str]]:
        """For each named image or row its prediction, or the sentence that says why there is none."""
        if self.specs is not None:
            return predict_rows(self.fast, entries, self.specs, batch=self.batch, top_k=self.top_k)
        return predict_entries(
            self.fast, entries, self.shape, self.pixels, batch=self.batch, top_k=self.top_k
        )

    def rows(self, entries: Iterable[Entry]) -> Iterator[dict[str, Any]]:
        """A row for each image; where it could not be read, `error` says why and the rest is None."""
        for name, outcome in self.outcomes(entries):
            if isinstance(outcome, Prediction):
                yield {**outcome.to_row(name, self.kind), "error": None}
            else:
                yield {**dict.fromkeys(self.columns), self.kind: name, "error": outcome}

    @property
    def kind(self) -> str:
        """What the model takes, which the column of their names is called by."""
        return "image" if self.specs is None else "row"

    @property
    def columns(self) -> list[str]:
        """The columns of a row."""
        names = [
            name for name in Prediction.__dataclass_fields__ if name != "top_k" or self.top_k is not None
        ]
        return [self.kind, *names, "error"]

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch with its predictions."""
        columns = (self.column,) if self.specs is None else input_names(self.specs) or (self.column,)
        if missing := [name for name in columns if name not in batch]:
            raise ValueError(f"a batch has the columns {', '.join(batch)} but no {missing[0]!r}; say column=")
        examples = zip(*(batch[name] for name in columns), strict=True)
        entries: list[Entry] = [
            (
                f"{self.kind} {number}",
                _content(example[0]) if self.specs is None else tuple(map(np.asarray, example)),
            )
            for number, example in enumerate(examples)
        ]
        rows = list(self.rows(entries))
        readable = all(row["error"] is None for row in rows)
        made: dict[str, np.ndarray] = {}
        for name in self.columns[1:]:
            values = [row[name] for row in rows]
            plain = name in _NUMBERS and readable
            made[name] = np.array(values) if plain else np.fromiter(values, dtype=object)
        return {**batch, **made}


_NUMBERS = ("class_index", "probability", "source_probability", "entropy", "disagreement")


def _content(image: Any) -> Content:
    content = image.get("bytes") if isinstance(image, Mapping) else image
    return (
        content
        if isinstance(content, bytes | np.ndarray)
        else Unreadable("it holds no image's bytes or pixels")
    )
