"""The README's Python, and the guide to your own models with its commands, run as they stand."""

import json
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import ensbridge as eb
from ensbridge import cli

README = Path(__file__).parents[1] / "README.md"
RESULTS = README.parent / "results"


def test_the_readmes_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(eb, "compress", partial(eb.compress, epochs=0.2, quiet=True))
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    data = eb.data.load_digits()
    names: dict[str, object] = {f"net_{name}": eb.experiments.digits().member() for name in "abc"}
    names |= {"train": data.train, "val": data.val, "test": data.test, "images": data.test.images[:4]}
    exec(compile(code, "README.md", "exec"), names)
    logits = names["logits"]
    assert isinstance(logits, torch.Tensor)
    torch.testing.assert_close(eb.load(tmp_path / "model")(data.test.images[:4]), logits)
    assert re.search("^(not )?worth it", capsys.readouterr().out, re.MULTILINE)


def test_the_readmes_table_is_what_was_measured() -> None:
    rows = {row["model"]: row for row in json.loads((RESULTS / "cifar10.json").read_text())["rows"]}
    best = json.loads((RESULTS / "cifar10" / "best.json").read_text())["rows"]
    rows |= {row["model"]: row for row in best if row["part"] == "test" and row["method"] != "DE"}
    names = ["DE-1", "DE-3", "DE-5", "distilled network", "+ coarse bridge"]
    names += ["control + coarse bridge", "mixed labels"]
    lines = [line for line in README.read_text().splitlines() if line.startswith("| ")][1:]
    for name, line in zip(names, lines, strict=True):
        _, macs, *cells = [cell.strip() for cell in line.replace("*", "").strip("| ").split(" | ")]
        row = rows[name]
        assert macs == f"{row['macs_ratio']:.2f}"
        scores = (("acc", 2), ("nll", 3), ("cnll", 3), ("ece", 3))
        assert cells == [f"{row[score]['mean']:.{digits}f}" for score, digits in scores]


def test_what_the_readme_says_is_due_to_the_ensemble_is_what_was_measured() -> None:
    best, text = (
        json.loads((RESULTS / "cifar10" / "best.json").read_text()),
        " ".join(README.read_text().split()),
    )
    nlls = {row["model"]: row["nll"]["mean"] for row in best["rows"] if row["part"] == "test"}
    (share,) = [
        row
        for row in best["differences"]
        if (row["part"], row["of"], row["than"]) == ("test", "distilled network", "control")
    ]
    gain = nlls["DE-1"] - nlls["distilled network"]
    assert f"takes NLL from {nlls['DE-1']:.3f} to {nlls['control']:.3f}" in text
    assert f"share is {-share['nll']:.4f} ± {share['se_seeds']:.4f} of {gain:.3f}" in text
    assert "Of the gain [a tenth]" in text
    assert 0.08 < -share["nll"] / gain < 0.12


def test_the_readme_names_the_two_commands_and_no_placeholder_is_left() -> None:
    text = README.read_text()
    assert "make quickstart" in text
    assert "make test" in text
    assert "@@" not in text


def test_every_file_that_the_readme_links_exists() -> None:
    for target in re.findall(r"\]\((?!https:)([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target


GUIDE = README.parent / "docs" / "your-own-models.md"


def blocks(language: str) -> list[str]:
    """What the guide has in that language, in its order."""
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)


def follow(folder: Path) -> None:
    """Run the guide's Python as a reader would: a block that begins with a file's name becomes that file."""
    names: dict[str, object] = {}
    for code in blocks("python"):
        if own := re.match(r"# (\w+\.py)\n", code):
            (folder / own[1]).write_text(code)
        else:
            exec(compile(code, GUIDE.name, "exec"), names)


def command(monkeypatch: pytest.MonkeyPatch, line: str) -> int:
    """Run a line of the guide's console; bench as short as it can be."""
    words = shlex.split(line, comments=True)
    if words[1] == "bench":
        words += ["--runtime", "eager", "--batch", "1", "--rounds", "1", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert isinstance(left.value.code, int)
    return left.value.code


def test_the_guide_to_your_own_models_runs_with_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # where a script finds the modules beside it
    follow(tmp_path)
    printed = capsys.readouterr().out.splitlines()
    verdict = next(line for line in printed if line.startswith(("worth it", "not worth it")))
    assert verdict in (tmp_path / "model" / "README.md").read_text()
    scores = [line for line in printed if line.startswith(("source: accuracy", "this: accuracy"))]
    assert all(float(line.split()[2]) > 60 for line in scores)  # networks that have learnt something
    assert (tmp_path / "model.onnx").exists()
    (console,) = blocks("console")
    outputs = []
    for line in console.splitlines():
        assert command(monkeypatch, line) == 0, line
        outputs.append(capsys.readouterr().out)
        plain = line.replace(" --allow my_nets", "")
        assert plain != line
        assert command(monkeypatch, plain) == 2  # a class of the reader's own is never imported unasked
        assert "--allow my_nets:SmallNet" in capsys.readouterr().err
    predicted, benched, exported = outputs
    assert [json.loads(line)["image"] for line in predicted.splitlines()] == ["one.png", "two.png"]
    assert "source + bridge" in benched
    assert exported.startswith("model/model.onnx: ")
