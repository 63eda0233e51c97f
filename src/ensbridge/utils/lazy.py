"""Names of a package that load on first use, so that what is asked for alone is imported."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(
    package: str, homes: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`: `homes` has the names, by space, that each module defines.

    `modules` has names that stand for a whole module.

    >>> getattr_, dir_ = lazy_names("ensbridge.utils", {"text": "short one_line"}, {"words": "text"})
    >>> dir_(), getattr_("short")([1]), getattr_("words").__name__
    (['one_line', 'short', 'words'], '[1]', 'ensbridge.utils.text')
    """
    whole = dict(modules or {})
    home_of = {name: module for module, names in homes.items() for name in names.split()} | whole

    def getattr_(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        state = random.getstate()  # rich draws from it when it is imported
        try:
            module = import_module(f"{package}.{home_of[name]}")
        finally:
            random.setstate(state)
        value = module if name in whole else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return getattr_, lambda: sorted(home_of)
