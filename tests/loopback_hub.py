"""A model hub on loopback that speaks the real one's shape: its API, `resolve` URLs, signed redirects to a second host.

Large files are in large-file storage: `resolve` answers with X-Linked-Etag (their SHA-256), X-Linked-Size and a
redirect to the store, which has another port, takes ranges and must never see a token. Everything is counted.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

SIGNATURE = "0SiGnAtUrE0"  # of redirects; whoever has it may download
BLOCK_BYTES = 16_384
COMMITS = ("1" * 40, "2" * 40)


@dataclass
class Request:
    """What a client asked for."""

    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class Hub:
    """Two servers, the files they hold by commit, how they misbehave, and what happened."""

    repo: str
    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str] = field(default_factory=lambda: {"main": COMMITS[0]})
    token: str | None = None  # of a private repository
    drop_after: list[int] = field(default_factory=list)  # bytes after which the store hangs up, one answer each
    fail_with: list[int] = field(default_factory=list)  # statuses of the store's next answers
    stall_after: int | None = None  # bytes after which the store says nothing more
    takes_ranges: bool = True
    moves_to: str | None = None  # commit that main moves to after it was first described
    corrupt: bool = False  # the store turns a bit
    page: bytes | None = None  # what the store answers instead, with status 200
    tells_length: bool = True  # of that page
    range_shift: int = 0  # bytes by which the store misses the range that was asked for
    redirect: str | None = None  # where to, instead of the store
    describe: Callable[[dict[str, Any]], bytes] = lambda info: json.dumps(info).encode()  # the API's answer
    url: str = ""
    store_url: str = ""
    requests: list[Request] = field(default_factory=list)
    store_requests: list[Request] = field(default_factory=list)
    served: dict[str, int] = field(default_factory=dict)  # bytes by file name
    stalled: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)

    def commit_of(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)

    def served_large(self) -> dict[str, int]:
        return {name: count for name, count in self.served.items() if name.endswith(".safetensors")}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._handle()

    def do_GET(self) -> None:
        self._handle()

    def _handle(self) -> None:
        raise NotImplementedError

    def _request(self) -> Request:
        return Request(self.command, self.path, self.headers["Range"], self.headers["Authorization"])

    def _answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


class _HubHandler(_Handler):
    def _handle(self) -> None:
        self.hub.requests.append(self._request())
        path = urlsplit(self.path).path
        api, files = f"/api/models/{self.hub.repo}", f"/{self.hub.repo}/resolve/"
        is_allowed = self.hub.token is None or self.headers["Authorization"] == f"Bearer {self.hub.token}"
        if not is_allowed or not path.startswith((api, files)):
            self._answer(401, X_Error_Code="RepoNotFound", X_Error_Message="Invalid username or password.")
        elif path.startswith(api):
            self._describe(path.removeprefix(api).removeprefix("/revision/") or "main")
        else:
            self._resolve(*path.removeprefix(files).split("/", 1))

    def _describe(self, revision: str) -> None:
        commit = self.hub.commit_of(revision)
        if commit is None:
            self._answer(404, X_Error_Code="RevisionNotFound", X_Error_Message=f"Invalid rev id: {revision}")
            return
        assert "blobs" in parse_qs(urlsplit(self.path).query)
        siblings = [_sibling(name, content) for name, content in self.hub.commits[commit].items()]
        info = {"id": self.hub.repo, "modelId": self.hub.repo, "sha": commit, "private": False, "siblings": siblings}
        self.hub.refs["main"] = self.hub.moves_to or self.hub.refs["main"]
        self._answer(200, self.hub.describe(info), Content_Type="application/json")

    def _resolve(self, revision: str, name: str) -> None:
        commit = self.hub.commit_of(revision)
        if commit is None:
            self._answer(404, X_Error_Code="RevisionNotFound")
            return
        content = self.hub.commits[commit].get(name)
        if content is None:
            self._answer(404, X_Repo_Commit=commit, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
        elif name.endswith(".safetensors"):
            self._answer(
                302,
                X_Repo_Commit=commit,
                X_Linked_Etag=f'"{hashlib.sha256(content).hexdigest()}"',
                X_Linked_Size=str(len(content)),
                Location=self.hub.redirect or f"{self.hub.store_url}/{commit}/{name}?X-Amz-Signature={SIGNATURE}",
            )
        else:
            if self.command == "GET":
                self.hub.served[name] = self.hub.served.get(name, 0) + len(content)
            etag = f'"{_git_sha1(content)}"'
            self._answer(200, content, X_Repo_Commit=commit, ETag=etag, Content_Length=str(len(content)))


class _StoreHandler(_Handler):
    def _handle(self) -> None:
        self.hub.store_requests.append(self._request())
        url = urlsplit(self.path)
        if SIGNATURE not in url.query or self.headers["Authorization"]:
            self._answer(400)  # as the real store does with a token beside a signature
            return
        if self.hub.fail_with:
            self._answer(self.hub.fail_with.pop(0))
            return
        if self.hub.page is not None:
            self._show_page(self.hub.page)
            return
        _, commit, name = url.path.split("/", 2)
        content = self.hub.commits[commit][name]
        first = 0
        if self.hub.takes_ranges and self.headers["Range"]:
            first = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-")) + self.hub.range_shift
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(content) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self._send(name, _flip(content) if self.hub.corrupt else content, first)

    def _show_page(self, page: bytes) -> None:
        self.send_response(200)
        if self.hub.tells_length:
            self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)
        self.close_connection = True

    def _send(self, name: str, content: bytes, first: int) -> None:
        stop = first + self.hub.drop_after.pop(0) if self.hub.drop_after else None
        for start in range(first, len(content), BLOCK_BYTES):
            if stop is not None and start >= stop:
                self.close_connection = True
                return
            if self.hub.stall_after is not None and start >= self.hub.stall_after:
                self.wfile.flush()
                self.hub.stalled.set()
                self.hub.closing.wait(60)
                self.close_connection = True
                return
            block = content[start : start + BLOCK_BYTES]
            try:
                self.wfile.write(block)
            except OSError:
                self.close_connection = True
                return
            self.hub.served[name] = self.hub.served.get(name, 0) + len(block)


def _sibling(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": _git_sha1(content)}
    if name.endswith(".safetensors"):
        entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 135}
    return entry


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients hang up here."""


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """Serve until the context ends."""
    with _serving(hub, _HubHandler) as hub.url, _serving(hub, _StoreHandler) as hub.store_url:
        try:
            yield hub
        finally:
            hub.closing.set()


@contextmanager
def _serving(hub: Hub, base: type[_Handler]) -> Iterator[str]:
    server = _Server(("127.0.0.1", 0), type(base.__name__, (base,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
