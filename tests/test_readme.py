"""The README's Python runs as it stands."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_readmes_examples_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(first, "README.md", "exec"), names)
    exec(compile(second, "README.md", "exec"), names)
    assert (tmp_path / "model" / "model.safetensors").exists()
    table = capsys.readouterr().out
    assert [line.split()[0] for line in table.splitlines()[2:]] == ["one", "ensemble", "bridge"]


def test_the_readme_names_the_two_commands_and_no_placeholder_is_left() -> None:
    text = README.read_text()
    assert "make quickstart" in text
    assert "make test" in text
    assert "@@" not in text


def test_every_file_that_the_readme_links_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target


def test_the_guide_to_your_own_models_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (README.parent / "docs" / "your-own-models.md").read_text()
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(code, "your-own-models.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    verdict = next(line for line in printed if line.startswith(("worth it", "not worth it")))
    assert verdict in (tmp_path / "model" / "README.md").read_text()
    scores = [line for line in printed if line.startswith(("source: accuracy", "this: accuracy"))]
    assert all(float(line.split()[2]) > 60 for line in scores)  # networks that have learnt something
    assert (tmp_path / "model" / "model.onnx").exists()
