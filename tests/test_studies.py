"""Studies are made of public names, and run from their command line."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import ensbridge as eb

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


# ------------------------------------------------------------------------------ rehearsals on made-up images

TRAINING = ("--limit", "4", "--batch", "2", "--epochs", "0.5")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A set of a few random images of CIFAR-10's size."""
    draws, path = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "tiny.npz"
    arrays = {}
    for part, count in (("train", 24), ("test", 6)):
        arrays[f"{part}_images"] = draws.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"{part}_labels"] = np.arange(count) % 10
    np.savez(path, **arrays)
    return str(path)


def rehearse(study: str, *arguments: str | Path) -> None:
    """Run a study as its command does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STUDIES[0].parent)
        patch.setattr(sys, "argv", [f"{study}.py", *map(str, arguments)])
        precision = torch.get_float32_matmul_precision()
        try:
            runpy.run_path(str(STUDIES[0].parent / f"{study}.py"), run_name="__main__")
        finally:
            torch.set_float32_matmul_precision(precision)


def measured(folder: Path) -> list[str]:
    """The models that a study measured beside the ensembles."""
    rows = eb.evaluation.read_scores(folder / "validation.json").rows
    return [row.model for row in rows if row.method != "DE"]


def test_switches_measures_what_it_was_asked_for(images: str, tmp_path: Path) -> None:
    rehearse("switches", images, tmp_path, *TRAINING, "--only", "T = 4", "control, T = 4")
    assert measured(tmp_path) == ["T = 4", "control, T = 4"]


def test_seeds_measures_each_target_and_seed(images: str, tmp_path: Path) -> None:
    rehearse("seeds", images, tmp_path, *TRAINING, "--seeds", "1", "--targets", "1,2,3", "1")
    assert measured(tmp_path) == ["bridge to 1, 2, 3, seed 1", "control, seed 1"]


def test_the_methods_of_the_headlines_choice_have_as_many_settings_each() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STUDIES[0].parent)
        study = importlib.import_module("choose_headline")
        counts = {"ED": 0, "frozen": 0, "pair": 0}
        models = [variant.model for variant in study.every_variant(study.RECIPE, 0)]
    for model in models:
        kind = {"member": "frozen", "distilled": "pair"}[model.info.source]
        counts[kind if model.info.method == "DBN" else "ED"] += 1
    assert set(counts.values()) == {24}
    names = [model.name for model in models]
    assert len(set(names)) == len(names)
    headline = study.RECIPE.headline_fit
    settled = f"copy {headline.optimizer} {headline.lr:g} {headline.weight_decay:g} T2 adam"
    assert settled in names  # what `compress` has is among them


def test_levers_measures_every_bridge_alone_and_with_its_source(images: str, tmp_path: Path) -> None:
    rehearse("levers", images, tmp_path, *TRAINING, "--inputs", "1,0", "--joint")
    models = measured(tmp_path / "mixup1-cutmix0-joint")
    assert [name for name in models if "joint-two" in name] == [
        "joint-two",
        *(
            f"joint-two + {label}{more}"
            for label in ("T2", "T2b", "two")
            for more in ("", ", mean with joint-two")
        ),
    ]


def test_best_for_cost_measures_networks_with_0_to_2_bridges(images: str, tmp_path: Path) -> None:
    methods = ("distilled", "wider", "end2", "labels")
    two_steps = (*TRAINING, "--epochs", "1")  # the rate of the first is 0
    rehearse("best_for_cost", images, tmp_path, *two_steps, "--methods", *methods)
    file = tmp_path / f"{'-'.join(methods)}-0" / "validation.json"
    rows = [row for row in eb.evaluation.read_scores(file).rows if row.method != "DE"]
    assert {row.model: round(row.macs_ratio, 2) for row in rows} == {
        "distilled 0": 1.0,
        "distilled 0 + fine": 1.16,
        "distilled 0 + coarse": 1.13,
        "distilled 0 + fine + coarse": 1.29,
        "wider 0": 1.16,
        "end2 0": 1.0,
        "labels 0": 1.0,
    }
    assert len({row.nll for row in rows}) == len(rows)
    file.unlink()  # what was saved is measured again
    rehearse("best_for_cost", images, tmp_path, *two_steps, "--methods", *methods)
    again = [row for row in eb.evaluation.read_scores(file).rows if row.method != "DE"]
    assert [row.nll for row in again] == pytest.approx([row.nll for row in rows], abs=1e-6)


def test_the_zoos_models_are_calibrated_and_saved_with_their_scores(images: str, tmp_path: Path) -> None:
    rehearse("best_for_cost", images, tmp_path, *TRAINING)
    rehearse("make_zoo", tmp_path / "distilled-0", images, "--limit", "4", "--zoo", tmp_path)
    studied = eb.evaluation.read_scores(tmp_path / "distilled-0" / "validation.json").rows
    fitted = {row.model: row.temperature for row in studied}
    whole = eb.load(tmp_path / "distilled-0" / "models" / "distilled-0")
    for name, count, model in (
        ("cifar10-distilled", 0, "distilled 0"),
        ("cifar10", 1, "distilled 0 + coarse"),
        ("cifar10-2", 2, "distilled 0 + fine + coarse"),
    ):
        fast = eb.load(tmp_path / name)
        assert len(fast.bridges) == count
        assert fast.temperature == pytest.approx(fitted[model], rel=1e-4)  # of the same validation images
        assert "| DE-5 | 5.00 |" in (tmp_path / name / "README.md").read_text()
        x = torch.rand(2, 3, 32, 32)
        if count == 2:
            assert torch.allclose(fast(x) * fast.temperature, whole(x), atol=1e-5)


@pytest.mark.parametrize(
    ("study", "arguments", "rows"),
    [
        ("members", ("results/cifar10", "--count", "3"), 1),
        ("inputs", ("--count", "3"), 7),
        ("source_logit_weight", (), 2),
    ],
)
def test_what_is_measured_without_training_is_a_whole_table(
    study: str,
    arguments: tuple[str, ...],
    rows: int,
    images: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(STUDIES[0].parents[1])
    rehearse(study, *(("--cifar10", images) if study == "source_logit_weight" else (images,)), *arguments)
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert [line.count("|") for line in lines] == [head.count("|")] * rows
    assert "nan" not in "".join(lines)
