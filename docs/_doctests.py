"""Docstrings' examples as code: Markdown by itself takes `>>>` for three nested quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe


class FencedDoctests(griffe.Extension):
    """Puts every paragraph that begins with `>>>` into a fence of its own."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with its examples in fences.

    >>> fenced("A sum.\\n\\n>>> 1 + 1\\n2").splitlines()
    ['A sum.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    parts = re.split(r"\n\s*\n", text.strip("\n"))
    return "\n\n".join(f"```pycon\n{part}\n```" if part.startswith(">>>") else part for part in parts)
