"""A fake hub on 127.0.0.1: the few endpoints that huggingface_hub asks for one model repository. Not a Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPO = "org/tiny"


def commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(b"".join(name.encode() + data for name, data in sorted(files.items()))).hexdigest()


@dataclass
class FakeHub:
    """One repository. `cut`: files whose connection breaks after so many bytes. `asked`: (method, path, Range) of each request."""

    files: dict[str, bytes]
    token: str = ""
    cut: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    url: str = ""
    no_tree: bool = False
    """The listing of files is refused; all else is answered."""

    @property
    def commit(self) -> str:
        return commit_of(self.files)

    def served(self) -> list[str]:
        """Files that were sent, in order."""
        return [
            path.rpartition("/")[2]
            for method, path, _ in self.asked
            if method == "GET" and "/resolve/" in path
        ]


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.asked.append((self.command, path, self.headers.get("Range", "")))
        api, files = f"/api/models/{REPO}/", f"/{REPO}/resolve/{hub.commit}/"
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._send(401, {"X-Error-Code": "RepoNotFound"})
        elif path.startswith(api):
            self._about(path.removeprefix(api))
        elif path.startswith(files) and path.removeprefix(files) in hub.files:
            self._file(path.removeprefix(files), body=body)
        else:
            self._send(404, {"X-Error-Code": "EntryNotFound" if path.startswith(files) else "RepoNotFound"})

    def _about(self, what: str) -> None:
        hub = self.hub
        kind, _, revision = what.partition("/")
        if revision not in ("main", "v1", hub.commit):
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
        elif kind == "tree" and hub.no_tree:
            self._send(403, {})
        elif kind == "tree":
            self._json([{"type": "file", "path": n, "size": len(d), "oid": n} for n, d in hub.files.items()])
        else:
            named = [{"rfilename": n, "size": len(d), "blobId": n} for n, d in hub.files.items()]
            self._json({"id": REPO, "sha": hub.commit, "siblings": named})

    def _file(self, name: str, *, body: bool) -> None:
        data = self.hub.files[name]
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        about = {
            "X-Repo-Commit": self.hub.commit,
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "Accept-Ranges": "bytes",
            "Content-Length": str(len(data) - first),
        }
        if first:
            about["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        cut = self.hub.cut.get(name)
        self._send(
            206 if first else 200, about, data[first:] if cut is None else data[first:][:cut], body=body
        )
        self.close_connection = cut is not None

    def _json(self, answer: object) -> None:
        data = json.dumps(answer).encode()
        self._send(200, {"Content-Type": "application/json", "Content-Length": str(len(data))}, data)

    def _send(self, code: int, headers: dict[str, str], data: bytes = b"", *, body: bool = True) -> None:
        self.send_response(code)
        for name, value in ({"Content-Length": "0"} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@contextmanager
def running(files: dict[str, bytes], token: str = "") -> Iterator[FakeHub]:
    """The hub, until the end of the block."""
    hub = FakeHub(files, token)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
