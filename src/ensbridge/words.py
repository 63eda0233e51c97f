"""What goes into a sentence: others' words, and commands that can be pasted. No torch here."""

from __future__ import annotations

import shlex


def one_line(error: Exception) -> str:
    """The beginning of an error's words, on one line, without what a terminal would obey.

    >>> one_line(RuntimeError("no kernel\\n  for this")), one_line(KeyError())
    ('no kernel for this', 'KeyError')
    >>> one_line(ValueError("\\x1b[2Jgone")), len(one_line(ValueError("long " * 100)))
    ('[2Jgone', 201)
    """
    text = "".join(each for each in " ".join(str(error).split()) if each.isprintable())
    return (text[:200] + "…" if len(text) > 200 else text) or type(error).__name__


def command(*words: object) -> str:
    """A command of ours, as a shell reads it.

    >>> command("data get cifar10 --root", "my data")
    "ensbridge data get cifar10 --root 'my data'"
    """
    first, *rest = map(str, words)
    return " ".join(["ensbridge", first, *map(shlex.quote, rest)])
