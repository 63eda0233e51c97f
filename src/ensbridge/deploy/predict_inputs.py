"""What `predict` is given: image files, folders, globs, parquet, `.npz` and tar shards, read part by part.

A model that takes no images has files of rows in their place.
"""

from __future__ import annotations

import glob
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ensbridge.data.folder import SUFFIXES
from ensbridge.deploy.batch import Entry
from ensbridge.deploy.predict_rows import ROW_FILES, open_rows
from ensbridge.deploy.predict_tables import AbstractInput, Damaged, NpzImages, ParquetRows, TarImages
from ensbridge.utils.extras import need
from ensbridge.utils.input_specs import InputSpec
from ensbridge.utils.text import one_line

TABLES = (".parquet", ".npz", ".tar", ".tar.gz", ".tgz")
MANIFEST = "predictions.json"  # in a folder of predictions
_PART = re.compile(r"part-\d{6,}\.parquet")


@dataclass(frozen=True)
class Files(AbstractInput):
    """Image files."""

    paths: Sequence[str]

    @property
    def name(self) -> str:
        """The files' names, from the root."""
        return "\n".join(map(os.path.abspath, self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, start: int, stop: int) -> Iterator[Entry]:
        """The files, which are opened by whoever decodes them."""
        return ((path, Path(path)) for path in self.paths[start:stop])

    def cut(self, start: int, stop: int) -> tuple[AbstractInput, int, int]:
        """These files' names, of what may be millions."""
        return Files(self.paths[start:stop]), 0, stop - start


def open_inputs(
    words: Iterable[str], lines: Iterable[str] = (), specs: tuple[InputSpec, ...] | None = None
) -> list[AbstractInput]:
    """The inputs that words name: files, folders, globs, and "-" for the paths in `lines`.

    `specs` is what a model that takes no images is called with.
    """
    inputs: list[AbstractInput] = []
    files: list[str] = []
    for word in _paths(words, lines, (*SUFFIXES, *TABLES) if specs is None else ROW_FILES):
        if specs is not None:
            inputs += open_table(word, specs)
            continue
        if not word.lower().endswith(TABLES):
            files.append(word)
            continue
        if files:
            inputs.append(Files(files))
            files = []
        inputs += open_table(word)
    return [*inputs, Files(files)] if files else inputs


def open_table(path: str, specs: tuple[InputSpec, ...] | None = None) -> Sequence[AbstractInput]:
    """What a file of many images, or of rows, holds; `Damaged` where that cannot be read."""
    kind = path.lower()
    if kind.endswith(".parquet"):
        need("parquet")
    try:
        if specs is not None:
            return [open_rows(path, specs)]
        if kind.endswith(".npz"):
            return NpzImages.open(path)
        return [ParquetRows.open(path)] if kind.endswith(".parquet") else TarImages.open(path)
    except Exception as error:  # decoders fail in many ways on damaged files
        return [_damaged(path, error)]


def _damaged(path: str, error: Exception) -> Damaged:
    if str(error).startswith((path, str(Path(path)))):  # a sentence of ours
        return Damaged(path, str(error))
    reason = "it does not exist" if isinstance(error, FileNotFoundError) else one_line(error)
    return Damaged(path, f"{path} cannot be read ({reason}); give a whole file")


def _paths(words: Iterable[str], lines: Iterable[str], suffixes: tuple[str, ...]) -> Iterator[str]:
    for word in words:
        if word == "-":
            if isinstance(lines, io.TextIOWrapper):
                lines.reconfigure(errors="surrogateescape")  # names need not be UTF-8
            for line in lines:
                if line.strip():
                    yield from _below(line.rstrip("\n"), suffixes)
        elif glob.has_magic(word) and not os.path.exists(word):
            matched = sorted(glob.glob(word, recursive=True))
            if not matched:
                raise ValueError(f"{word} matches no file; check it")
            for path in matched:
                yield from _below(path, suffixes)
        else:
            yield from _below(word, suffixes)


def _below(path: str, suffixes: tuple[str, ...]) -> Sequence[str]:
    """What a folder holds; a file is itself, and an empty folder is named among what cannot be read."""
    return (sorted(_walk(path, suffixes)) if os.path.isdir(path) else []) or [path]


def _walk(folder: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """The images and tables below a folder, but for hidden ones; links to folders are not followed.

    Parts of predictions are not among them, so that a folder of those may lie there.
    """
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if MANIFEST in names:
            names = [name for name in names if not _PART.fullmatch(name)]
        for name in names:
            if not name.startswith(".") and name.lower().endswith(suffixes):
                yield os.path.join(where, name)
