"""A local HTTP server that stands for the Hugging Face Hub, as far as huggingface_hub asks for models.

Large files (Git LFS) are redirected to another origin, as the Hub does, with ranges. What goes wrong is said by
`Trouble`; every request is noted.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".bin")


@dataclass
class Repository:
    """Files of one commit, and the names of that commit."""

    files: dict[str, bytes]
    refs: tuple[str, ...] = ("main",)
    gated: bool = False

    @cached_property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


@dataclass
class Trouble:
    """What goes wrong. Counts go down with each time that it does."""

    cut_after: dict[str, int] = field(default_factory=dict)  # name: bytes, then the connection ends; once
    wrong: set[str] = field(default_factory=set)  # names of files with another content than is stated
    stated_size: dict[str, int] = field(default_factory=dict)
    stated_digest: dict[str, str] = field(default_factory=dict)
    stated_commit: str = ""
    too_many: int = 0  # answers 429 with Retry-After: 0


@dataclass(frozen=True)
class Seen:
    """One request."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    is_storage: bool  # of the second origin


class StandInHub:
    """`with StandInHub() as hub:` serves `hub.repositories` at `hub.url`."""

    def __init__(self) -> None:
        self.repositories: dict[str, list[Repository]] = {}
        self.trouble = Trouble()
        self.seen: list[Seen] = []
        self.token = ""  # that opens gated repositories
        self._servers = [self._server(False), self._server(True)]
        self.url, self._storage = (f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers)
        self._threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in self._servers]

    def add(self, name: str, files: dict[str, bytes], refs: tuple[str, ...] = ("main",), **more: Any) -> Repository:
        repository = Repository(files, refs, **more)
        self.repositories.setdefault(name, []).append(repository)
        return repository

    def fetched(self) -> Counter[str]:
        """How often the content of each file was asked for."""
        return Counter(
            seen.path.rpartition("/")[2]
            for seen in self.seen
            if seen.method == "GET" and "/api/" not in seen.path and (seen.is_storage or not seen.path.endswith(LARGE))
        )

    def __enter__(self) -> StandInHub:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        for thread in self._threads:
            thread.join()

    def _server(self, is_storage: bool) -> ThreadingHTTPServer:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: Any) -> None:
                """Quiet."""

            def do_GET(self) -> None:
                hub.answer(self, is_storage)

            do_HEAD = do_GET  # noqa: N815

        return ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def answer(self, http: BaseHTTPRequestHandler, is_storage: bool) -> None:
        path = unquote(urlsplit(http.path).path)
        head = http.headers
        self.seen.append(Seen(http.command, path, head.get("Range"), head.get("Authorization"), is_storage))
        if is_storage:
            _, digest, name = path.rsplit("/", 2)
            self._content(http, name, self._blobs()[digest])
            return
        if self.trouble.too_many:
            self.trouble.too_many -= 1
            _send(http, 429, {"Retry-After": "0"})
            return
        parts = path.strip("/").split("/")
        if parts[0] == "api" and parts[1] != "models":
            _send(http, 404, {})
            return
        if parts[0] == "api":
            name, revision = "/".join(parts[2:4]), "/".join(parts[5:]) or "main"
        else:
            name, revision = "/".join(parts[:2]), parts[3]
        found = self.repositories.get(name)
        if found is None:
            _send(http, 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            return
        repository = next((one for one in found if revision in (*one.refs, one.commit)), None)
        if repository is None:
            _send(http, 404, {"X-Error-Code": "RevisionNotFound"})
        elif repository.gated and head.get("Authorization") != f"Bearer {self.token}" and parts[0] != "api":
            _send(http, 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to it is restricted."})
        elif parts[0] == "api":
            said = self._tree(repository) if parts[4:5] == ["tree"] else self._info(name, repository)
            _send(http, 200, {"Content-Type": "application/json"}, json.dumps(said).encode())
        else:
            self._resolve(http, repository, "/".join(parts[4:]))

    def _info(self, name: str, repository: Repository) -> dict[str, Any]:
        siblings = []
        for file, content in repository.files.items():
            size = self.trouble.stated_size.get(file, len(content))
            stated = self.trouble.stated_digest.get(file)
            one: dict[str, Any] = {"rfilename": file, "size": size, "blobId": stated or _git_digest(content)}
            if file.endswith(LARGE):
                digest = stated or hashlib.sha256(content).hexdigest()
                one["lfs"] = {"sha256": digest, "size": size, "pointerSize": 134}
            siblings.append(one)
        commit, gated = self.trouble.stated_commit or repository.commit, "manual" if repository.gated else False
        return {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": [], "downloads": 0,
                "private": False, "gated": gated, "likes": 0}  # fmt: skip

    @staticmethod
    def _tree(repository: Repository) -> list[dict[str, Any]]:
        """Return the listing that huggingface_hub's own snapshot_download reads."""
        entries = []
        for file, content in repository.files.items():
            one: dict[str, Any] = {"type": "file", "path": file, "size": len(content), "oid": _git_digest(content)}
            if file.endswith(LARGE):
                one["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
            entries.append(one)
        return entries

    def _resolve(self, http: BaseHTTPRequestHandler, repository: Repository, file: str) -> None:
        headers = {"X-Repo-Commit": repository.commit}
        content = repository.files.get(file)
        if content is None:
            _send(http, 404, {**headers, "X-Error-Code": "EntryNotFound"})
        elif file.endswith(LARGE):
            digest = hashlib.sha256(content).hexdigest()
            size = str(self.trouble.stated_size.get(file, len(content)))
            linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": size}
            place = f"{self._storage}/{digest}/{file.rpartition('/')[2]}?signature=secret"
            _send(http, 302, {**headers, **linked, "Location": place})
        else:
            self._content(http, file, content, {**headers, "ETag": f'"{_git_digest(content)}"'})

    def _content(
        self, http: BaseHTTPRequestHandler, name: str, content: bytes, headers: dict[str, str] | None = None
    ) -> None:
        if name in self.trouble.wrong:
            content = bytes(255 - byte for byte in content)
        size, first, status = len(content), 0, 200
        found = dict(headers or {})
        if (wanted := http.headers.get("Range")) and http.command == "GET":
            first, status = int(wanted.removeprefix("bytes=").partition("-")[0]), 206
            found["Content-Range"] = f"bytes {first}-{size - 1}/{size}"
        cut = self.trouble.cut_after.pop(name, None) if http.command == "GET" else None
        if cut is None:
            _send(http, status, found, content[first:])
            return
        _send(http, status, {**found, "Content-Length": str(size - first)}, content[first : first + cut], False)

    def _blobs(self) -> dict[str, bytes]:
        return {
            hashlib.sha256(content).hexdigest(): content
            for found in self.repositories.values() for one in found for content in one.files.values()
        }  # fmt: skip


def _git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _send(
    http: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes = b"", whole: bool = True
) -> None:
    """whole: with the body's own length; else the connection ends before what the headers promise."""
    http.send_response(status)
    for name, value in {**({"Content-Length": str(len(body))} if whole else {}), **headers}.items():
        http.send_header(name, value)
    http.end_headers()
    if http.command != "HEAD":
        http.wfile.write(body)
    if not whole:
        http.close_connection = True
