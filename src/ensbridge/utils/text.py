"""What goes into a sentence: others' words, and commands that can be pasted. No torch here."""

from __future__ import annotations

import json
import shlex


def one_line(error: BaseException) -> str:
    """The beginning of an error's words, on one line, without what a terminal would obey.

    >>> one_line(RuntimeError("no kernel\\n  for this")), one_line(KeyError())
    ('no kernel for this', 'KeyError')
    >>> one_line(ValueError("\\x1b[2Jgone")), len(one_line(ValueError("long " * 100)))
    ('[2Jgone', 201)
    """
    text = "".join(character for character in " ".join(str(error).split()) if character.isprintable())
    return (text[:200] + "…" if len(text) > 200 else text) or type(error).__name__


def short(value: object) -> str:
    """A value as JSON, for an error: on one line, of printable characters, cut where it is long.

    >>> short("a\\nb"), len(short("long " * 100))
    ('"a\\\\nb"', 58)
    """
    try:
        text = json.dumps(value, default=repr)
    except (RecursionError, ValueError):  # lists in lists in lists, whole numbers of thousands of digits
        return "a value too long to show"
    return text if len(text) <= 60 else text[:57] + "…"


def visible(text: str, lines: bool = False) -> str:
    """Text in which nothing is hidden or obeyed by a terminal; with `lines` it may have several.

    >>> print(visible("a\\x1b[31mb\\nc\\u202e"), visible("one\\ntwo", lines=True))
    a\\x1b[31mb\\nc\\u202e one
    two
    """
    return "".join(
        character
        if character.isprintable() or (lines and character == "\n")
        else character.encode("unicode_escape").decode()
        for character in text
    )


def command(*words: object) -> str:
    """A command of ours, as a shell reads it.

    >>> command("data get cifar10 --root", "my data")
    "ensbridge data get cifar10 --root 'my data'"
    """
    first, *rest = map(str, words)
    return " ".join(["ensbridge", first, *map(shlex.quote, rest)])
