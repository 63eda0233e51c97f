"""The documentation's Python runs as it stands, and its commands are commands."""

import re
import shlex
from pathlib import Path

import pytest
import typer
import typer.core

import ensbridge
import ensbridge.cli  # registers the commands
from ensbridge.cli.base import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTED_ELSEWHERE = ("README.md", "your-own-models.md")  # with what they print and write, in test_readme.py


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def commands(page: Path) -> list[str]:
    """The lines of a page's consoles, continued lines joined, that call ensbridge."""
    lines = "\n".join(blocks(page, "console")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("ensbridge ")]


CODE = [page for page in PAGES if blocks(page, "python") and page.name not in TESTED_ELSEWHERE]


@pytest.mark.parametrize("page", CODE, ids=lambda page: page.name)
def test_a_pages_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "documentation"}
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), names)
    if page.name == "index.md":  # the first example that anyone runs shows the product at work
        import ensbridge as eb

        models, data = names["models"], names["data"]
        assert isinstance(models, dict)
        assert isinstance(data, eb.data.Splits)
        one, _, fast = eb.evaluate(models, data.test, data.val).rows
        assert fast.nll < one.nll - 0.1
        assert fast.acc > one.acc


@pytest.mark.parametrize(
    "line", [pytest.param(line, id=f"{page.name}: {line[:60]}") for page in PAGES for line in commands(page)]
)
def test_a_command_and_its_options_exist(line: str) -> None:
    _, *words = shlex.split(line, comments=True)
    command = typer.main.get_command(app)
    while isinstance(command, typer.core.TyperGroup):
        command = command.commands[words.pop(0)]
    command.make_context("ensbridge", words)  # raises for an option that there is not


def test_every_page_is_linked_in_the_navigation_and_every_link_has_a_target() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        assert re.search(rf"\b{re.escape(page.name)}$", navigation, re.MULTILINE), page.name
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page.name, target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_public_name_that_a_page_mentions_exists(page: Path) -> None:
    text = "\n".join(blocks(page, "python")) + "\n".join(re.findall(r"`([^`\n]+)`", page.read_text()))
    for path in set(re.findall(r"\beb((?:\.[A-Za-z_]\w*)+)", text)):
        value: object = ensbridge
        for name in path.strip(".").split("."):
            value = getattr(value, name)
