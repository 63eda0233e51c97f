"""Tests whose packages are not installed are not collected: all need the extra `serve`, some more."""

from __future__ import annotations

from importlib.util import find_spec

from ensbridge.utils.extras import missing

_NEEDS = {
    "test_serve_http.py": "tritonclient",
    "test_serve_page.py": "playwright",
    "test_serve_schema.py": "schemathesis",
}
collect_ignore = [file for file, package in _NEEDS.items() if find_spec(package) is None]
collect_ignore_glob = ["test_*.py"] if missing("serve") else []
