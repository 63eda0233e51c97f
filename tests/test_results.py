"""The pages of results/ are what their generator makes of the JSON beside them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from safetensors import safe_open

from ensbridge import cli

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
GENERATED = {".md", ".json", ".html", ".npz", ".safetensors", ".svg"}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "studies" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES: dict[Path, str] = load("make_pages").pages()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_what_the_generator_makes(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == PAGES[path], "run: python studies/make_pages.py"


def test_every_page_is_generated_and_nothing_else_lies_there() -> None:
    assert set(RESULTS.rglob("*.md")) == set(PAGES)
    assert {path.suffix for path in RESULTS.rglob("*") if path.is_file()} <= GENERATED


def test_a_changed_score_changes_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = load("make_pages")
    document = json.loads((RESULTS / "cifar10.json").read_text(encoding="utf-8"))
    row = next(row for row in document["rows"] if row["model"] == "DE-3")
    row["nll"]["mean"] = 0.9876
    known = pages.read
    monkeypatch.setattr(pages, "read", lambda name: document if name == "cifar10.json" else known(name))
    changed = [path.name for path, text in pages.pages().items() if text != PAGES[path]]
    assert changed == ["cifar10.md"]


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.safetensors")), ids=lambda path: path.stem)
def test_weights_are_in_half_precision(path: Path) -> None:
    with safe_open(path, framework="np") as file:
        types = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert types <= {"F16", "I64"}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_file_of_figures_has_the_command_that_made_it(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    parts = document.values() if path.stem == "tables" else [document]
    assert all(part.get("command") or part.get("commands") for part in parts)


def test_the_gains_over_the_control_of_the_table_are_those_of_the_scores() -> None:
    document, tables = (
        json.loads((RESULTS / name).read_text(encoding="utf-8")) for name in ("cifar10.json", "tables.json")
    )
    gains = [document["better than the control"][name]["all seeds"] for name in ("KL", "KL, T = 4")]
    gains.append(document["better than the control"]["bridge's own loss"]["all seeds"])
    second = {row["model"]: row["below its control's NLL"] for row in document["second set of members"]}
    expected = [f"{gain['nll']:.4f} ± {gain['error']:.4f}" for gain in gains]
    for model, row in (("+1 DBN (KL, T = 4)", 2), ("+1 DBN", 4)):
        ((nll, error),) = second[model]
        expected.insert(row, f"{nll:.4f} ± {error:.4f}".replace("-", "−"))
    rows = tables["cifar10, gain over the control"]["rows"]
    assert [row["cells"][1] for row in rows[:5]] == expected


def rows_of(document: object) -> list[dict[str, object]]:
    """Every row of a document that has the scores of a model, as numbers or as cells of a table."""
    if isinstance(document, list):
        return [row for part in document for row in rows_of(part)]
    if not isinstance(document, dict):
        return []
    is_row = "model" in document or ((cells := document.get("cells", ["—"])) and cells[0] != "—")
    here = [document] if is_row else []
    return here + [row for key, part in document.items() if key not in OTHERS for row in rows_of(part)]


OTHERS = ("paper", "corrupted")  # not ours; means over corruptions of models that stand among the rows
SCORES = [path for path in RESULTS.rglob("*.json") if path.name.endswith(("-test.json", "-validation.json"))]


@pytest.mark.parametrize("path", sorted({*RESULTS.rglob("*.json")} - {*SCORES}), ids=lambda path: path.stem)
def test_every_row_says_how_its_model_was_trained(path: Path) -> None:
    fields = load("provenance").FIELDS
    for row in rows_of(json.loads(path.read_text(encoding="utf-8"))):
        assert set(fields) <= set(row), row.get("model", row.get("cells"))


@pytest.mark.parametrize("path", SCORES, ids=lambda path: path.stem)
def test_scores_say_how_their_models_were_trained(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert {"dataset", "seed"} <= set(document)
    assert {"preset", "schedule", "epochs"} <= set(document["settings"])
    assert all({"method", "members"} <= set(row) for row in document["rows"])


def test_commands_of_what_was_not_run_would_train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads((RESULTS / "not-run.json").read_text(encoding="utf-8"))["rows"]
    commands = [row["command"].replace("--seed S", "--seed 1").split() for row in rows]
    for words in (words for words in commands if words[:2] == ["ensbridge", "train"]):
        monkeypatch.setattr(sys, "argv", [*words, "--dry-run"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
        assert "40,960 images" in capsys.readouterr().out


def test_what_the_docs_say_of_disagreement_is_what_was_measured() -> None:
    document = json.loads((RESULTS / "uncertainty.json").read_text(encoding="utf-8"))

    def value(part: str, key: str, **wanted: str) -> float:
        (row,) = [row for row in document[part] if wanted.items() <= row.items()]
        return row[key]

    ranks = [
        value("correlation", "rank", images="test", target="DE-5", model=model, score=score)
        for model, score in (
            ("one bridge", "disagreement"),
            ("one bridge", "entropy"),
            ("control", "disagreement"),
        )
    ]
    areas = [
        value("detection", "auroc", images=images, model="one bridge", score=score)
        for images in ("errors", "cifar100")
        for score in ("disagreement", "entropy")
    ]
    how, guide = (
        " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())
        for name in ("how-it-works.md", "your-own-models.md")
    )
    shipped = [
        value("detection", "auroc", images=images, model="distilled, one bridge", score=score)
        for images in ("errors", "cifar100")
        for score in ("disagreement", "entropy")
    ]
    ours, entropy, control = (f"{rank:.2f}" for rank in ranks)
    assert f"is {ours}; that of the model's entropy is {entropy}" in how
    assert f"which knows no members, {control}." in how
    assert f"(rank correlation {ours} and {entropy})" in guide
    percent, share = (
        [f"{scale * area:.{digits}f}" for area in areas] for scale, digits in ((100, 1), (1, 3))
    )
    assert f"(AUROC {percent[0]} against {percent[1]})" in how
    assert f"({percent[2]} against {percent[3]})" in how
    of_zoo = [f"{100 * area:.1f}" for area in shipped]
    assert f"({of_zoo[0]} against {of_zoo[1]}, and {of_zoo[2]} against {of_zoo[3]})" in how
    assert f"network {shipped[0]:.3f} against entropy's {shipped[1]:.3f} for errors" in guide
    assert f"{shipped[2]:.3f} against {shipped[3]:.3f} for CIFAR-100's" in guide
    assert f"{share[0]} against entropy's {share[1]} for errors, {share[2]} against {share[3]} for" in guide
