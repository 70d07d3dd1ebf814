"""A hub on this machine: the part of the API of the Hugging Face Hub that uploads use.

    with Hub(token="secret") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        ...
        assert hub.repositories["me/model"].branches["main"]["README.md"] == b"..."

It speaks the protocol of ``huggingface_hub`` without Xet (``HF_HUB_DISABLE_XET=1``): repositories,
branches, preupload, LFS batches, and commits.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin")
"""Files that are sent through LFS."""


@dataclass(slots=True)
class Repository:
    """branches: the files of each. messages: of the commits, oldest first."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    messages: list[str] = field(default_factory=list[str])

    @property
    def commit(self) -> str:
        """The id of the newest commit."""
        return hashlib.sha1(repr(self.messages).encode()).hexdigest()


class Hub:
    """Serves until the block ends. token: the only one that may write. status: when set, the answer
    to every request."""

    def __init__(self, token: str = "secret") -> None:
        self.token = token
        self.status = 0
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        hub = self

        class Handler(_Handler):
            def __init__(self, *arguments: Any) -> None:
                self.hub = hub
                super().__init__(*arguments)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        self._dispatch(b"")

    def do_POST(self) -> None:
        self._dispatch(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.blobs[urlsplit(self.path).path.rpartition("/")[2]] = body
        self._answer(200, {})

    def _dispatch(self, body: bytes) -> None:
        if self.hub.status:
            return self._answer(self.hub.status, {"error": f"status {self.hub.status}"})
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._answer(401, {"error": "Invalid username or password."})
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        match parts:
            case ["api", "repos", "create"]:
                self._create(json.loads(body))
            case ["api", "validate-yaml"]:
                self._answer(200, {"warnings": [], "errors": []})
            case [owner, name, "info", "lfs", "objects", "batch"] if name.endswith(".git"):
                self._batch(f"{owner}/{name.removesuffix('.git')}", json.loads(body))
            case ["api", "models", owner, name, *rest]:
                self._repository(f"{owner}/{name}", rest, body)
            case _:
                self._answer(404, {"error": f"no route for {self.path}"})

    def _create(self, request: Mapping[str, Any]) -> None:
        name = f"{request['organization']}/{request['name']}"
        url = {"url": f"{self.hub.url}/{name}"}
        if name in self.hub.repositories:
            return self._answer(409, {"error": "You already created this model repo", **url})
        self.hub.repositories[name] = Repository(private=request.get("visibility") == "private")
        self._answer(200, url)

    def _repository(self, name: str, rest: list[str], body: bytes) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        match rest:
            case [] | ["revision", _]:
                self._answer(
                    200, {"id": name, "private": repository.private, "sha": repository.commit, "tags": [], "siblings": []}
                )
            case ["branch", branch]:
                if branch in repository.branches:
                    return self._answer(409, {"error": "Reference already exists"})
                repository.branches[branch] = dict(repository.branches["main"])
                self._answer(200, {})
            case ["preupload", branch]:
                self._preupload(repository, branch, json.loads(body))
            case ["commit", branch]:
                self._commit(name, repository, branch, body)
            case _:
                self._answer(404, {"error": f"no route for {self.path}"})

    def _preupload(self, repository: Repository, branch: str, request: Mapping[str, Any]) -> None:
        if branch not in repository.branches:
            return self._answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        files = [
            {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular", "shouldIgnore": False}
            for one in request["files"]
        ]
        self._answer(200, {"files": files})

    def _batch(self, name: str, request: Mapping[str, Any]) -> None:
        objects: list[dict[str, Any]] = []
        for one in request["objects"]:
            entry = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.hub.blobs:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/blobs/{name}/{one['oid']}"}}
            objects.append(entry)
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name: str, repository: Repository, branch: str, body: bytes) -> None:
        files = repository.branches[branch]
        for line in body.splitlines():
            record = json.loads(line)
            value = record["value"]
            match record["key"]:
                case "header":
                    repository.messages.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.blobs[value["oid"]]
                case key:
                    return self._answer(400, {"error": f"unknown operation {key}"})
        url = f"{self.hub.url}/{name}/commit/{repository.commit}"
        self._answer(200, {"success": True, "commitOid": repository.commit, "commitUrl": url, "hookOutput": ""})

    def _answer(self, status: int, body: object, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
