"""Names of a package that load on first use, so that what is asked for alone is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`: `homes` has the names, by space, that each module defines.

    >>> getattr_, dir_ = lazy_names("ensbridge.utils", {"text": "short one_line"})
    >>> dir_(), getattr_("short")([1])
    (['one_line', 'short'], '[1]')
    """
    modules = {name: module for module, names in homes.items() for name in names.split()}

    def getattr_(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return getattr_, lambda: sorted(modules)
