"""Studies are made of public names: whoever has the package can run and change them."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

STUDIES = sorted((Path(__file__).parent.parent / "studies").glob("*.py"))
PUBLIC = {"bridge", "data", "evaluation", "experiments", "methods", "metrics", "models", "report"}


def private(code: str) -> Iterator[str]:
    """What a study imports or reads of the package that is not public, or not there."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("ensbridge."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ensbridge":
            package = (node.module or "").removeprefix("ensbridge").removeprefix(".")
            for alias in node.names:
                name = f"{package}.{alias.name}" if package else alias.name
                if (package and package not in PUBLIC) or not is_public(name):
                    yield name
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if re.fullmatch(r"eb(\.\w+){1,2}", name) and not is_public(name.removeprefix("eb.")):
                yield name


def is_public(name: str) -> bool:
    """Whether it is a name of the package, or of one of its public packages."""
    value: object = importlib.import_module("ensbridge")
    for part in name.split("."):
        if part.startswith("_") or part not in dir(value):
            return False
        value = getattr(value, part)
    return True


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_uses_public_names_alone(path: Path) -> None:
    assert [*private(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import ensbridge as eb; eb.experiments.run_study; eb.data.ImageSet.batch", []),
        ("from ensbridge.experiments import Job", []),
        ("from ensbridge.experiments.jobs import Job", ["experiments.jobs.Job"]),
        ("import ensbridge.utils.files", ["ensbridge.utils.files"]),
        ("from ensbridge.training import FitConfig", ["training.FitConfig"]),
        ("import ensbridge as eb; eb.experiments.no_such_name", ["eb.experiments.no_such_name"]),
        ("import ensbridge as eb; eb._compress", ["eb._compress"]),
    ],
)
def test_what_is_not_public_is_seen(code: str, found: list[str]) -> None:
    assert [*private(code)] == found
