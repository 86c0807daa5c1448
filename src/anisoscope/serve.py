"""The report over http on this machine, made again when the run folder changes. It only reads.

    /          the report
    /status    which state of the folder is current, and where the run stands: {"state": ..., "sentence": ...}

Nothing else is there: paths are compared, never opened. Loopback only, unless asked otherwise; a request must name this
host, so that a page from elsewhere cannot read the report through a name of its own (DNS rebinding).
"""

import hashlib
import html
import ipaddress
import json
import math
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from anisoscope.errors import SpecError
from anisoscope.report.gathering import gather
from anisoscope.report.page import render
from anisoscope.status import survey
from anisoscope.store import Store

_WATCHED = (".parquet", ".failed.json", ".plan.json")
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Watched:
    """The report of run folders, made again when something in them changed."""

    def __init__(self, folders: Sequence[Path], *, patience: float = math.inf) -> None:
        """Nothing is read yet. A request waits `patience` seconds for a page that is being made."""
        self.folders = tuple(folders)
        self.patience = patience
        self._stores = tuple(map(Store, self.folders))
        self._lock = threading.Lock()
        self._making: threading.Thread | None = None
        self._shown = ""
        self._page = b""
        self._fault = b""
        self._rest_until = 0.0

    def page(self) -> bytes:
        """The page of the current state; one that fails says why and tries again.

        Where it takes longer than `patience` to make, the page before it, or one that says what is being done.
        """
        making = self.begin()
        if making is not None:
            making.join(min(self.patience, threading.TIMEOUT_MAX))
        return self._fault or self._page or _waiting(self.folders)

    def status(self) -> dict[str, str]:
        """Which page is ready; a newer one is begun where the folder changed. Cheap enough to be asked every second."""
        self.begin()
        return {"state": self._shown, "sentence": "; ".join(filter(None, map(_sentence, self._stores)))}

    def begin(self) -> threading.Thread | None:
        """The thread that makes a page of what is in the folders now; None where the page is the current one."""
        with self._lock:
            if (self._making is None or not self._making.is_alive()) and self._is_due():
                self._making = threading.Thread(target=self._make, daemon=True)
                self._making.start()
            return self._making if self._making is not None and self._making.is_alive() else None

    def _make(self) -> None:
        state, begun = self.state(), time.monotonic()
        try:
            self._page = render(gather(self.folders, state=state)).encode()
        except Exception as error:  # the folder may be half written: the page must survive it
            self._fault = _apology(error).encode()
            return
        self._fault, self._shown = b"", state
        # A folder that changes faster than pages are made keeps this machine busy half of the time at most.
        self._rest_until = 2 * time.monotonic() - begun

    def _is_due(self) -> bool:
        return not self._page or (time.monotonic() >= self._rest_until and self.state() != self._shown)

    def state(self) -> str:
        """A name for what lies in the folders now."""
        seen = [entry for folder in self.folders for entry in _entries(folder)]
        return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]


def _entries(folder: Path) -> Iterable[tuple[str, int, int]]:
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return
    for path in paths:
        if path.name.endswith(_WATCHED) and not path.name.startswith("."):
            try:
                found = path.stat()
            except OSError:
                continue
            yield path.name, found.st_size, found.st_mtime_ns


def _sentence(store: Store) -> str:
    if not store.folder.is_dir():
        return f"{store.folder.name} is not there yet"
    try:
        return survey(store).sentence()
    except Exception:  # half-written notes; the next question may find them whole
        return ""


def _waiting(folders: Iterable[Path]) -> bytes:
    named = html.escape(", ".join(folder.name for folder in folders))
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="2">'
        "<title>anisoscope report</title></head><body><main><h1>The report is being made</h1>"
        f"<p>Reading {named} and drawing figures. This page reloads by itself.</p></main></body></html>"
    ).encode("utf-8", "backslashreplace")


def _apology(error: Exception) -> str:
    told = html.escape(f"{type(error).__name__}: {error}")
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5">'
        "<title>anisoscope report</title></head><body><main><h1>Not readable now</h1>"
        f"<p>{told}</p><p>This page tries again every five seconds.</p></main></body></html>"
    )


class Server(ThreadingHTTPServer):
    """The server, and what it shows."""

    daemon_threads = True

    def __init__(self, pages: Watched, host: str, port: int) -> None:
        """Bind; port 0 takes a free one."""
        self.pages = pages
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.allowed = _allowed_hosts(host)

    @property
    def address(self) -> str:
        """Where a browser finds it."""
        host, port = self.server_address[0], self.server_address[1]
        return f"http://{f'[{host}]' if ':' in str(host) else host}:{port}/"


def _allowed_hosts(host: str) -> frozenset[str] | None:
    """Names a request may call us by; None where we listen to everyone, under names we cannot know."""
    if host in ("0.0.0.0", "::", ""):
        return None
    return frozenset({"127.0.0.1", "localhost", "[::1]", f"[{host}]" if ":" in host else host.lower()})


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version = "anisoscope"
    sys_version = ""
    # A client that connects and says nothing does not keep a thread for ever.
    timeout = 30

    def do_GET(self) -> None:
        """The page or the state."""
        self._answer()

    def do_HEAD(self) -> None:
        """The same without its body."""
        self._answer()

    def __getattr__(self, name: str) -> Any:
        # http.server looks for do_POST and the like, and answers 501 where there is none; we only read.
        if name.startswith("do_"):
            return self._refuse_method
        raise AttributeError(name)

    def _refuse_method(self) -> None:
        self.close_connection = True
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD are answered\n", "text/plain", Allow="GET, HEAD")

    def _answer(self) -> None:
        allowed = self.server.allowed
        if allowed is not None and _host_of(self.headers.get("Host", "")) not in allowed:
            self._send(HTTPStatus.MISDIRECTED_REQUEST, b"this host goes by another name\n", "text/plain")
            return
        path = self.path.partition("?")[0]
        if path == "/":
            self._send(HTTPStatus.OK, self.server.pages.page(), "text/html")
        elif path == "/status":
            self._send(HTTPStatus.OK, json.dumps(self.server.pages.status()).encode(), "application/json")
        elif path == "/favicon.ico":
            self._send(HTTPStatus.NO_CONTENT, b"", "image/x-icon")
        else:
            self._send(HTTPStatus.NOT_FOUND, b"there is a report at /, and nothing else\n", "text/plain")

    def _send(self, status: HTTPStatus, body: bytes, kind: str, **headers: str) -> None:
        try:
            self.send_response(status)
            for name, value in {**_HEADERS, **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            # A browser that reloads lets go of what it had asked for.
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a page that asks every two seconds would fill the terminal."""


def _host_of(header: str) -> str:
    """The name in a Host header, without its port."""
    header = header.strip().lower()
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_server(
    folders: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    allow_other_hosts: bool = False,
    patience: float = math.inf,
) -> Server:
    """A server that is bound and does not run yet; `serve_forever` runs it."""
    if not is_loopback(host) and not allow_other_hosts:
        raise SpecError(
            f"{host} can be reached from other machines, and whoever reaches it can read the report: "
            "add --allow-other-hosts where that is wanted"
        )
    try:
        return Server(Watched(folders, patience=patience), host, port)
    except (OSError, OverflowError) as error:
        raise SpecError(f"cannot listen on {host}, port {port}: {error}") from error
