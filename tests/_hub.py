"""A stand-in of the Hugging Face hub on this machine: the few questions that its library asks, answered."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


@dataclass
class Hub:
    """Repositories, each a list of commits; what was asked; and what is refused."""

    url: str = ""
    repos: dict[str, list[tuple[str, Files]]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    stored: Files = field(default_factory=dict)  # large files by digest, before their commit
    sizes: dict[str, int | None] = field(
        default_factory=dict
    )  # what is said of a file's size, if not the truth
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)  # part of a path: status, error code

    def commit(self, name: str, files: Files) -> str:
        """Add files to a repository and return the commit's name."""
        commits = self.repos.setdefault(name, [])
        there = {**(commits[-1][1] if commits else {}), **files}
        sha = hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest()
        commits.append((sha, there))
        return sha

    def at(self, name: str, revision: str) -> tuple[str, Files] | None:
        """A commit by its name, or the newest as "main"."""
        commits = self.repos[name]
        if revision == "main":
            return commits[-1] if commits else (40 * "0", {})
        return next((each for each in commits if each[0] == revision), None)


class Answer(Exception):
    """What ends a question."""

    def __init__(self, status: int, body: object = None, code: str = "", **headers: str) -> None:
        super().__init__(status)
        self.status, self.body = status, body
        self.headers = {**({"X-Error-Code": code} if code else {}), **headers}


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def answer(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.asked.append(f"{self.command} {path}")
        try:
            for part, (status, code) in self.hub.refuse.items():
                if part in path:
                    raise Answer(status, {"error": "refused\x1b[2J"}, code)
            parts = path.split("/")
            if parts[0] == "api":
                self.api(parts[1:], sent)
            if parts[0] == "stored":  # where the batch's answer sent a large file
                self.hub.stored[parts[1]] = sent
                raise Answer(200)
            if path.endswith("info/lfs/objects/batch"):
                self.batch(json.loads(sent)["objects"])
            if parts[2:3] == ["resolve"]:
                self.file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
            raise Answer(404)
        except Answer as done:
            body = done.body if isinstance(done.body, bytes) else json.dumps(done.body).encode()
            self.send_response(done.status)
            for key, value in done.headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def api(self, parts: list[str], sent: bytes) -> None:
        if parts == ["repos", "create"]:
            asked = json.loads(sent)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.hub.repos:
                raise Answer(409, {"error": "exists", "url": f"{self.hub.url}/{name}"})
            self.hub.repos[name] = []
            self.hub.private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
            raise Answer(200, {"url": f"{self.hub.url}/{name}"})
        if parts == ["validate-yaml"]:
            good = json.loads(sent)["content"].startswith("---\nlibrary_name: ensbridge\n")
            raise Answer(200 if good else 400, {"errors": [], "warnings": []})
        name, what = "/".join(parts[1:3]), parts[3:]
        if name not in self.hub.repos:
            raise Answer(404, {"error": "no such repository"}, "RepoNotFound")
        revision = what[1] if len(what) > 1 else "main"
        found = self.hub.at(name, revision)
        if found is None:
            raise Answer(404, {"error": "no such revision"}, "RevisionNotFound")
        if what[:1] == ["preupload"]:
            files = [each["path"] for each in json.loads(sent)["files"]]
            modes = {each: "lfs" if each.endswith(".safetensors") else "regular" for each in files}
            listed = [{"path": each, "uploadMode": modes[each], "shouldIgnore": False} for each in files]
            raise Answer(200, {"files": listed})
        if what[:1] == ["commit"]:
            sha = self.hub.commit(name, self.committed(sent))
            raise Answer(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha})
        if what[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in found[1].items()
            ]
            raise Answer(200, tree)
        siblings = [
            {"rfilename": path, "size": self.hub.sizes.get(path, len(content))}
            for path, content in found[1].items()
        ]
        raise Answer(200, {"id": name, "sha": found[0], "siblings": siblings})

    def committed(self, sent: bytes) -> Files:
        """The files of a commit, from its lines of JSON."""
        files: Files = {}
        for line in map(json.loads, sent.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
        return files

    def batch(self, objects: list[dict[str, Any]]) -> None:
        actions = [
            {**each, "actions": {"upload": {"href": f"{self.hub.url}/stored/{each['oid']}"}}}
            for each in objects
        ]
        raise Answer(200, {"transfer": "basic", "objects": actions})

    def file(self, name: str, revision: str, path: str) -> None:
        found = self.hub.at(name, revision) if name in self.hub.repos else None
        if found is None:
            raise Answer(404, code="RepoNotFound")
        if path not in found[1]:
            raise Answer(404, code="EntryNotFound", X_Repo_Commit=found[0])
        content = found[1][path]
        raise Answer(200, content, X_Repo_Commit=found[0], ETag=f'"{hashlib.sha1(content).hexdigest()}"')


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a free port of this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
