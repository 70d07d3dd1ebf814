"""A hub of Hugging Face in this process: the endpoints that ``huggingface_hub`` and ``datasets``
read a repository through."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """kind: ``models`` or ``datasets``. commits: files by commit; the last one is main."""

    kind: str
    commits: dict[str, Mapping[str, bytes]]
    gated: bool = False

    def at(self, revision: str) -> str | None:
        return list(self.commits)[-1] if revision == "main" else (revision if revision in self.commits else None)


@dataclass
class Hub:
    """url: for HF_ENDPOINT. asked: the paths of requests."""

    repositories: dict[str, Repository]
    url: str = ""
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        api = parts[0] == "api"
        parts = parts[1:] if api else parts
        kind = parts[0] if parts[0] in ("models", "datasets") else "models"
        parts = parts[1:] if parts[0] == kind else parts
        name, rest = "/".join(parts[:2]), parts[2:]
        repository = self.repositories.get(f"{kind}/{name}")
        if repository is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if repository.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b'{"error": "gated"}'
        what, revision, *inside = [*rest, "main"] if len(rest) < 2 and rest else rest or ["revision", "main"]
        commit = repository.at(revision)
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = repository.commits[commit]
        if not api:
            return self._file(files, "/".join(inside), commit)
        if what == "revision":
            siblings = [{"rfilename": file} for file in files]
            return _json({"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": [], "gated": False})
        if what == "tree":
            return _json([_entry(file, data) for file, data in files.items() if file.startswith("/".join(inside))])
        if what == "paths-info":
            wanted = json.loads(body)["paths"]
            return _json([_entry(file, files[file]) for file in wanted if file in files])
        return 404, {}, b"{}"

    def _file(self, files: Mapping[str, bytes], name: str, commit: str) -> tuple[int, dict[str, str], bytes]:
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        return 200, {"ETag": f'"{_oid(files[name])}"', "X-Repo-Commit": commit, "Accept-Ranges": "none"}, files[name]


def _entry(name: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


@contextmanager
def serve(repositories: dict[str, Repository]) -> Iterator[Hub]:
    """A hub with repositories by ``kind/org/name``."""
    hub = Hub(repositories)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            hub.asked.append(self.path)
            status, headers, data = hub.answer(self.path, body)
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_HEAD = do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
