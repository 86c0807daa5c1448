"""A hub of our own: the calls of the Hugging Face hub, answered from a folder on this machine.

    with Hub(tmp_path / "hub") as hub:
        commit = hub.add("lab/tiny", "step1", {"config.json": b"{}", "model.safetensors": path})
        subprocess.run(command, env={**os.environ, **hub.environment(tmp_path / "home")})
        assert not hub.downloads("*.safetensors")

The client is the ordinary one and needs nothing but its environment, so a hub serves any number of processes.
By hand: `python tests/hub.py FOLDER`, with repositories as FOLDER/<owner>/<name>/<revision>/files.
"""

import fnmatch
import hashlib
import json
import re
import socket
import struct
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

LARGE = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}
DATE = "2024-01-01T00:00:00.000Z"
PIECE = 1 << 16

_FILE = re.compile(r"/(?P<repo>[^/]+(?:/[^/]+)??)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
_CALL = re.compile(
    r"/api/models(?:/(?P<repo>[^/]+(?:/[^/]+)??)"
    r"(?:/(?P<call>refs|revision|tree|paths-info)(?:/(?P<revision>[^/]+)(?:/(?P<path>.+))?)?)?)?"
)


@dataclass(frozen=True, kw_only=True)
class Blob:
    """A file's contents, by their hash, and how git knows them."""

    sha256: str
    size: int
    oid: str
    pointer_size: int | None
    """Only for large files: git keeps a pointer in their place."""

    @property
    def etag(self) -> str:
        return self.oid if self.pointer_size is None else self.sha256


@dataclass(kw_only=True)
class Repo:
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Fault:
    kind: Literal["slow", "hang", "break", "corrupt", "refuse"]
    pattern: str
    amount: float = 0
    times: float = float("inf")
    """How often it strikes each address."""
    reset: bool = False
    struck: Counter[str] = field(default_factory=Counter)


@dataclass(kw_only=True)
class Reply:
    name: str
    """What the patterns of faults see: `api/models/...`, or `<repo>/resolve/<commit>/<path>` for files."""
    body: bytes | Path
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class NotFound(Exception):
    """An answer 404 with the code that the client turns into an exception."""

    def __init__(self, code: str, commit: str | None = None) -> None:
        super().__init__(code)
        self.code, self.commit = code, commit


class Hub:
    """Repositories, the server that shows them, and the faults it was told to have."""

    def __init__(self, folder: Path, *, page: int = 1000) -> None:
        self.folder, self.page = folder, page
        self.requests: list[tuple[str, str, int]] = []
        """Method, address as it was sent, status."""
        self.repos: dict[str, Repo] = {}
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self.stopping = threading.Event()
        self._server: _Server | None = None
        self._port = 0

    # What there is

    def add(
        self,
        repo: str,
        revision: str,
        files: Mapping[str, Path | bytes],
        *,
        kind: Literal["branch", "tag"] = "branch",
    ) -> str:
        """A revision with its files; gives its commit. Added again with other files, a branch moves on."""
        known = self.repos.setdefault(repo, Repo())
        blobs = {path: self._keep(path, source) for path, source in sorted(files.items())}
        text = "\n".join([repo, revision, *(f"{path} {blob.sha256}" for path, blob in blobs.items())])
        commit = hashlib.sha1(text.encode()).hexdigest()
        known.commits[commit] = blobs
        (known.branches if kind == "branch" else known.tags)[revision] = commit
        if "main" not in known.branches:
            self.add(repo, "main", {"README.md": f"# {repo}\n".encode()})
        return commit

    def add_folder(self, folder: Path) -> None:
        """Every repository laid out as <owner>/<name>/<revision>/files."""
        for root in sorted(path for path in folder.glob("*/*/*") if path.is_dir()):
            owner, name, revision = root.relative_to(folder).parts
            files = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
            self.add(f"{owner}/{name}", revision, files)

    def remove(self, repo: str, revision: str | None = None, path: str | None = None) -> None:
        """A repository, a revision or one file of it vanishes."""
        if revision is None:
            del self.repos[repo]
            return
        known = self.repos[repo]
        commit = self._commit(repo, revision)
        if path is not None:
            del known.commits[commit][path]
            return
        del known.commits[commit]
        for refs in (known.branches, known.tags):
            for name in [name for name, target in refs.items() if target == commit]:
                del refs[name]

    def downloads(self, pattern: str = "*") -> list[str]:
        """Addresses of files whose contents were sent, or begun to be."""
        sent = (unquote(path) for method, path, status in self.requests if method == "GET" and status in (200, 206))
        return [path for path in sent if "/resolve/" in path and fnmatch.fnmatchcase(path, pattern)]

    # What goes wrong: patterns fit `<repo>/resolve/<commit>/<path>` for files and `api/models/...` for calls

    def slow(self, pattern: str, bytes_per_second: float) -> None:
        """Contents trickle."""
        self._faults.append(Fault(kind="slow", pattern=pattern, amount=bytes_per_second))

    def hang(self, pattern: str, seconds: float) -> None:
        """The answer is that late, also to HEAD."""
        self._faults.append(Fault(kind="hang", pattern=pattern, amount=seconds))

    def break_once(self, pattern: str, *, after_bytes: int = 0, times: int = 1, reset: bool = False) -> None:
        """Downloads of each file are cut off the first time, or the first `times`; by a reset instead of an end."""
        self._faults.append(Fault(kind="break", pattern=pattern, amount=after_bytes, times=times, reset=reset))

    def break_always(self, pattern: str, *, after_bytes: int = 0, reset: bool = False) -> None:
        """Downloads are cut off every time."""
        self._faults.append(Fault(kind="break", pattern=pattern, amount=after_bytes, reset=reset))

    def corrupt(self, pattern: str) -> None:
        """The last byte is wrong: the length is right, and weights load."""
        self._faults.append(Fault(kind="corrupt", pattern=pattern))

    def refuse(self, pattern: str, status: int, *, times: float = float("inf")) -> None:
        """An error of the server, such as 429 or 503, also to HEAD."""
        self._faults.append(Fault(kind="refuse", pattern=pattern, amount=status, times=times))

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        self._faults.clear()

    def strike(self, kind: str, name: str) -> Fault | None:
        """The fault of this kind that strikes now."""
        with self._lock:
            for fault in self._faults:
                if fault.kind == kind and fnmatch.fnmatchcase(name, fault.pattern) and fault.struck[name] < fault.times:
                    fault.struck[name] += 1
                    return fault
        return None

    # The server

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self._port}"

    def environment(self, home: Path) -> dict[str, str]:
        """Variables for a process that shall use this hub and nothing of the user's."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def start(self) -> None:
        """Serve; after a stop, at the same address."""
        self.stopping.clear()
        self._server = _Server(("127.0.0.1", self._port), _Handler)
        self._server.hub = self
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """From now on connections are refused."""
        if self._server is not None:
            self.stopping.set()
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> "Hub":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Answers

    def answer(self, address: str, form: Mapping[str, list[str]]) -> Reply:
        """What the hub says to a call."""
        parts = urlsplit(address)
        try:
            if found := _CALL.fullmatch(parts.path):
                query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
                return self._listing(found, address, query, form)
            if found := _FILE.fullmatch(parts.path):
                repo, revision, path = (unquote(part) for part in found.group("repo", "revision", "path"))
                return self._file(repo, revision, path)
            raise NotFound("NoSuchCall")
        except NotFound as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": error.code}
            if error.commit:
                headers["X-Repo-Commit"] = error.commit
            body = json.dumps({"error": error.code}).encode()
            return Reply(name=unquote(parts.path)[1:], body=body, status=404, headers=headers)

    def _file(self, repo: str, revision: str, path: str) -> Reply:
        commit = self._commit(repo, revision)
        blob = self.repos[repo].commits[commit].get(path)
        if blob is None:
            raise NotFound("EntryNotFound", commit)
        headers = {"ETag": f'"{blob.etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if blob.pointer_size is not None:
            headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(blob.size)}
        return Reply(name=f"{repo}/resolve/{commit}/{path}", body=self.folder / "blobs" / blob.sha256, headers=headers)

    def _listing(
        self, found: re.Match[str], address: str, query: Mapping[str, str], form: Mapping[str, list[str]]
    ) -> Reply:
        repo, call, revision, path = (unquote(part or "") for part in found.group("repo", "call", "revision", "path"))
        page, expand = self.page, query.get("expand", "").lower() == "true"
        if not repo:
            content: Any = [
                self._info(name, "main", full="full" in query)
                for name in sorted(self.repos)
                if name.startswith(f"{query['author']}/" if "author" in query else "")
                and query.get("search", "").lower() in name.lower()
            ]
            page = min(page, int(query.get("limit", page)))
        elif call == "refs":
            content = self._refs(repo)
        elif call == "tree":
            content = list(self._tree(repo, revision, path, query.get("recursive", "").lower() == "true", expand))
            page = min(page, 50) if expand else page
        elif call == "paths-info":
            wanted = set(form.get("paths", []))
            content = [entry for entry in self._tree(repo, revision, "", True, expand) if entry["path"] in wanted]
        else:
            content = self._info(repo, revision or "main", full=True, blobs="blobs" in query)
        headers = {"Content-Type": "application/json"}
        if isinstance(content, list):
            start = int(query.get("cursor", 0))
            if start + page < len(content):
                rest = urlencode({**query, "cursor": start + page})
                headers["Link"] = f'<{self.endpoint}{urlsplit(address).path}?{rest}>; rel="next"'
            content = content[start : start + page]
        return Reply(name=unquote(found.string)[1:], body=json.dumps(content).encode(), headers=headers)

    def _refs(self, repo: str) -> dict[str, Any]:
        known = self._repo(repo)
        shown = {
            names: [{"name": name, "ref": f"refs/{where}/{name}", "targetCommit": commit} for name, commit in refs]
            for names, where, refs in (
                ("branches", "heads", known.branches.items()),
                ("tags", "tags", known.tags.items()),
            )
        }
        return {**shown, "converts": [], "pullRequests": []}

    def _info(self, repo: str, revision: str, *, full: bool, blobs: bool = False) -> dict[str, Any]:
        commit = self._commit(repo, revision)
        info: dict[str, Any] = {
            "_id": commit[:24],
            "id": repo,
            "modelId": repo,
            "author": repo.partition("/")[0],
            "private": False,
            "gated": False,
            "disabled": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "createdAt": DATE,
            "lastModified": DATE,
        }
        if full:
            info["sha"] = commit
            info["siblings"] = [
                {"rfilename": path, **(_sibling(blob) if blobs else {})}
                for path, blob in self.repos[repo].commits[commit].items()
            ]
        return info

    def _tree(self, repo: str, revision: str, below: str, recursive: bool, expand: bool) -> Iterable[dict[str, Any]]:
        commit = self._commit(repo, revision)
        prefix = f"{below}/" if below else ""
        files = {path: blob for path, blob in self.repos[repo].commits[commit].items() if path.startswith(prefix)}
        if below and not files:
            raise NotFound("EntryNotFound", commit)
        last = {"lastCommit": {"id": commit, "title": "add", "date": DATE}} if expand else {}
        parents = (str(parent) for path in files for parent in Path(path).parents)
        folders = {folder for folder in parents if folder.startswith(prefix) and folder not in (".", below)}
        for path in sorted([*folders, *files]):
            if not recursive and "/" in path.removeprefix(prefix):
                continue
            if path in folders:
                oid = hashlib.sha1(f"{commit}{path}".encode()).hexdigest()
                yield {"type": "directory", "oid": oid, "size": 0, "path": path, **last}
                continue
            blob = files[path]
            entry = {"type": "file", "oid": blob.oid, "size": blob.size, "path": path, **last}
            if blob.pointer_size is not None:
                entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": blob.pointer_size}
            yield entry

    def _repo(self, repo: str) -> Repo:
        if repo not in self.repos:
            raise NotFound("RepoNotFound")
        return self.repos[repo]

    def _commit(self, repo: str, revision: str) -> str:
        known = self._repo(repo)
        commit = known.branches.get(revision) or known.tags.get(revision) or revision
        if commit not in known.commits:
            raise NotFound("RevisionNotFound")
        return commit

    def _keep(self, path: str, source: Path | bytes) -> Blob:
        """Contents are kept once, whatever revisions share them, and copied: the source may change later."""
        data = source if isinstance(source, bytes) else source.read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        kept = self.folder / "blobs" / sha256
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(data)
        if Path(path).suffix not in LARGE:
            return Blob(sha256=sha256, size=len(data), oid=_git_oid(data), pointer_size=None)
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(data)}\n".encode()
        return Blob(sha256=sha256, size=len(data), oid=_git_oid(pointer), pointer_size=len(pointer))


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _sibling(blob: Blob) -> dict[str, Any]:
    shown: dict[str, Any] = {"size": blob.size, "blobId": blob.oid}
    if blob.pointer_size is not None:
        shown["lfs"] = {"sha256": blob.sha256, "size": blob.size, "pointerSize": blob.pointer_size}
    return shown


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True
    hub: Hub

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client may leave whenever it likes.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        hub = self.server.hub
        form = parse_qs(self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode())
        reply = hub.answer(self.path, form)
        if fault := hub.strike("hang", reply.name):
            hub.stopping.wait(fault.amount)
        if fault := hub.strike("refuse", reply.name):
            reply = Reply(name=reply.name, body=b"{}", status=int(fault.amount))
        size = len(reply.body) if isinstance(reply.body, bytes) else reply.body.stat().st_size
        start, stop = self._range(reply, size)
        hub.requests.append((self.command, self.path, reply.status))
        self.send_response(reply.status)
        # One call a connection: none outlives the server's stop.
        headers = {"Content-Length": str(stop - start), "Connection": "close"}
        for name, value in (reply.headers | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        if self.command != "HEAD":
            self._send(reply, start, stop, size)

    do_HEAD = do_POST = do_GET

    def _range(self, reply: Reply, size: int) -> tuple[int, int]:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None or isinstance(reply.body, bytes):
            return 0, size
        start, stop = int(asked.group(1)), min(size, int(asked.group(2) or size) + 1)
        if start >= size:
            reply.status, reply.headers["Content-Range"] = 416, f"bytes */{size}"
            return 0, 0
        reply.status, reply.headers["Content-Range"] = 206, f"bytes {start}-{stop - 1}/{size}"
        return start, stop

    def _send(self, reply: Reply, start: int, stop: int, size: int) -> None:
        hub = self.server.hub
        slow, broken, corrupt = (hub.strike(kind, reply.name) for kind in ("slow", "break", "corrupt"))
        end = min(stop, start + int(broken.amount)) if broken else stop
        piece = max(1, int(slow.amount / 20)) if slow else PIECE
        # Contents are opened whole: what a hub of tests serves is small.
        data = bytearray(reply.body if isinstance(reply.body, bytes) else reply.body.read_bytes())
        if corrupt and size:
            data[-1] ^= 0xFF
        for first in range(start, end, piece):
            part = data[first : min(first + piece, end)]
            if (slow and hub.stopping.wait(len(part) / slow.amount)) or hub.stopping.is_set():
                return
            self.wfile.write(part)
        if broken and broken.reset:
            # Closing at once, with nothing lingering, sends a reset where an ordinary close would send an end.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Tests read `Hub.requests`."""


def main() -> None:
    """Serve a folder until interrupted."""
    with tempfile.TemporaryDirectory() as kept, Hub(Path(kept)) as hub:
        hub.add_folder(Path(sys.argv[1]))
        print(f"export HF_ENDPOINT={hub.endpoint}", *sorted(hub.repos), sep="\n", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
