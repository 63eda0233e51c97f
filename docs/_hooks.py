"""What `mkdocs build` does beyond Markdown: pages from outside docs/, and the lists of the API reference.

Links in docs/ are those of the repository (`../results/cifar10.md`), so that they work wherever it is read;
in the site the same pages lie below the root.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import FunctionType, MethodType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE"),
    *(
        "benchmarks/*.md",
        "results/*.md",
        "results/*.json",
        "results/*/*.md",
        "results/*/levers.json",
        "results/*/report.html",
    ),
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's other pages, each under its own path."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between docs/ and the rest into the site's, and name what a module holds."""
    inside = (ROOT / "docs" / page.file.src_uri).exists()
    if inside:
        above = "../" * (1 + page.file.src_uri.count("/"))
        below = above.removeprefix("../")
        markdown = markdown.replace(f"]({above}", f"]({below}")
    else:
        markdown = re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)
    return re.sub(r"^<!-- every name of (\S+) -->$", _names, markdown, flags=re.MULTILINE)


def _names(found: re.Match[str]) -> str:
    """Every public function and class of a module, functions first, as mkdocstrings reads them."""
    module = import_module(found[1])
    public = [name for name in dir(module) if not name.startswith("_")]
    values = {name: getattr(module, name) for name in public}
    ours = [name for name, value in values.items() if _is_documented(value)]
    ours.sort(key=lambda name: (isinstance(values[name], type), name.lower()))
    return "\n\n".join(f"::: {found[1]}.{name}" for name in ours)


def _is_documented(value: object) -> bool:
    home = getattr(value, "__module__", "") or ""
    return isinstance(value, type | FunctionType | MethodType) and home.split(".")[0] == "ensbridge"
