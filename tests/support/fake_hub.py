"""A HuggingFace hub on this machine: serves folders over HTTP as huggingface_hub
expects, and fails when told to.

A fault belongs to one file of one revision and is used up by the requests it spoils.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

# drop: half of what was asked for, then the connection ends. short: half, and a
# Content-Length that says so. wrong: all bytes, the second half of them inverted.
# error: 500 in place of the file.
Fault = Literal["drop", "short", "wrong", "error"]


def commit_of(repo: str, revision: str) -> str:
    return hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()


class FakeHub:
    """`with FakeHub({"owner/name": {"main": folder, …}}) as hub:` serves until the
    block ends.

    Attributes:
        requests: "GET revision/file" and "API path", in the order they came.
        faults: `faults[revision, file]` is a list of what to do to the next GETs of
            that file.
    """

    def __init__(self, repos: Mapping[str, Mapping[str, Path]]) -> None:
        self.repos = repos
        self.requests: list[str] = []
        self.faults: dict[tuple[str, str], list[Fault]] = {}
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self})
        )
        # A handler that waits on a keep-alive connection must not hold up the end.
        self._server.daemon_threads = True
        self._thread = Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeHub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def revision(self, repo: str, name: str) -> str | None:
        """Return the revision behind a name or a commit."""
        return next(
            (r for r in self.repos[repo] if name in (r, commit_of(repo, r))), None
        )


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/"):
            self.hub.requests.append(f"API {path}")
            self._api(path)
        elif match := re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path):
            self._file(*match.groups())
        else:
            self._refuse("EntryNotFound")

    def _api(self, path: str) -> None:
        match = re.fullmatch(
            r"/api/models/(.+?)(?:/(revision|tree|refs)(?:/([^/]+))?(?:/(.*))?)?", path
        )
        if match is None or match[1] not in self.hub.repos:
            return self._refuse("RepoNotFound")
        repo, what, wanted = match[1], match[2], match[3]
        if what == "refs":
            branches = [
                {
                    "name": r,
                    "ref": f"refs/heads/{r}",
                    "targetCommit": commit_of(repo, r),
                }
                for r in self.hub.repos[repo]
            ]
            return self._json({"branches": branches, "converts": [], "tags": []})
        revision = self.hub.revision(repo, wanted or "main")
        if revision is None:
            return self._refuse("RevisionNotFound")
        files = sorted(self.hub.repos[repo][revision].iterdir())
        if what == "tree":
            if match[4]:
                return self._refuse("EntryNotFound")
            listing = [
                {
                    "type": "file",
                    "path": f.name,
                    "size": f.stat().st_size,
                    "oid": _etag(f.read_bytes()),
                }
                for f in files
            ]
            return self._json(listing)
        siblings = [{"rfilename": f.name} for f in files]
        self._json(
            {
                "_id": "1",
                "id": repo,
                "modelId": repo,
                "sha": commit_of(repo, revision),
                "siblings": siblings,
            }
        )

    def _file(self, repo: str, wanted: str, name: str) -> None:
        if repo not in self.hub.repos:
            return self._refuse("RepoNotFound")
        revision = self.hub.revision(repo, wanted)
        if revision is None:
            return self._refuse("RevisionNotFound")
        headers = {"X-Repo-Commit": commit_of(repo, revision), "Accept-Ranges": "bytes"}
        path = self.hub.repos[repo][revision] / name
        if not path.is_file():
            return self._refuse("EntryNotFound", headers)
        body = path.read_bytes()
        headers["ETag"] = f'"{_etag(body)}"'
        # A large file is known by the hash and the size of what its pointer stands for.
        if path.suffix == ".safetensors":
            headers |= {
                "X-Linked-ETag": f'"{hashlib.sha256(body).hexdigest()}"',
                "X-Linked-Size": str(len(body)),
            }
        if self.command == "HEAD":
            return self._send(200, headers, body)
        self.hub.requests.append(f"GET {revision}/{name}")
        faults = self.hub.faults.get((revision, name))
        fault = faults.pop(0) if faults else None
        if fault == "error":
            return self._refuse(None, status=500)
        if fault == "wrong":
            body = body[: len(body) // 2] + bytes(
                255 - byte for byte in body[len(body) // 2 :]
            )
        status, total = 200, len(body)
        if range_wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(range_wanted[1])
            status, body = 206, body[start:]
            headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
        if fault == "short":
            body = body[: len(body) // 2]
        self._send(
            status, headers, body, cut=len(body) // 2 if fault == "drop" else None
        )

    def _json(self, content: Any) -> None:
        self._send(
            200, {"Content-Type": "application/json"}, json.dumps(content).encode()
        )

    def _refuse(
        self,
        code: str | None,
        headers: Mapping[str, str] | None = None,
        status: int = 404,
    ) -> None:
        self._send(
            status, {**(headers or {}), **({"X-Error-Code": code} if code else {})}, b""
        )

    def _send(
        self,
        status: int,
        headers: Mapping[str, str],
        body: bytes,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


def _etag(body: bytes) -> str:
    """As git names a file."""
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def output_of(hub: FakeHub, tmp_path: Path, *code: str) -> list[str]:
    """Return what a process prints that knows no hub but this one, and has nothing in
    its cache.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HF_HUB_OFFLINE", "HF_TOKEN")
    }
    environment |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1",
    }
    ended = subprocess.run(
        [sys.executable, "-c", *code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout.splitlines()
