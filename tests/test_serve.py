"""The served report: it follows a growing run, only reads, and answers nobody it was not asked to answer."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_report import stored, unit_of
from typer.testing import CliRunner

from anisoscope.cli import app
from anisoscope.errors import SpecError
from anisoscope.serve import Server, is_loopback, open_server


def ask(server: Server, path: str = "/", *, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    """A request as a browser would send it, path untouched."""
    name, port = server.server_address[0], server.server_address[1]
    connection = http.client.HTTPConnection(str(name), int(port), timeout=60)
    connection.putrequest(method, path, skip_host=host is not None)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def wait_for_state(server: Server, other_than: str) -> str:
    """The state of the page once it has changed."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        state = json.loads(ask(server, "/status")[1])["state"]
        if state not in ("", other_than):
            return state
        time.sleep(0.1)
    raise AssertionError("the page did not change")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that is not there yet."""
    return tmp_path / "run"


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with open_server([folder]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_page_follows_a_run_from_nothing_through_garbage(server: Server, folder: Path) -> None:
    status, page = ask(server)
    assert status == 200
    assert "There are no units in this folder yet." in page
    assert "connect-src &#39;self&#39;" in page
    first = json.loads(ask(server, "/status")[1])
    assert re.search(r'data-state="(\w+)"', page)[1] == first["state"]  # type: ignore[index]
    assert first["sentence"] == "run is not there yet"

    stored(folder, unit_of(step=1))
    second = wait_for_state(server, first["state"])
    page = ask(server)[1]
    assert f'data-state="{second}"' in page
    assert "25 numbers" in page

    (folder / "half.parquet").write_bytes(next(folder.glob("*.parquet")).read_bytes()[:100])
    (folder / "half.failed.json").write_text("{")
    (folder / "half.plan.json").write_text("[")
    third = wait_for_state(server, second)
    page = ask(server)[1]
    assert "half.parquet is no result of anisoscope" in page
    assert "25 numbers" in page

    stored(folder, unit_of(step=2))
    wait_for_state(server, third)
    assert "2 checkpoints of tiny on pydoc: 3 metrics, 50 numbers" in ask(server)[1]


def test_an_unchanged_folder_is_not_read_again(server: Server, folder: Path) -> None:
    stored(folder, unit_of(step=None))
    first = ask(server)[1]
    assert ask(server)[1] == first, "the time it was made would differ"
    state = json.loads(ask(server, "/status")[1])["state"]
    (folder / "notes.txt").write_text("not of a run")
    assert json.loads(ask(server, "/status")[1])["state"] == state


def test_only_reading_is_answered(server: Server) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert ask(server, method=method)[0] == 405
    status, body = ask(server, method="HEAD")
    assert (status, body) == (200, "")


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/run/x.parquet", "/status/..", "/index.html"],
)
def test_no_path_leads_to_a_file(server: Server, folder: Path, path: str) -> None:
    (folder.parent / "secret.txt").write_text("secret")
    assert ask(server, path)[0] == 404
    assert ask(server, f"/../{folder.parent.name}/secret.txt")[0] == 404


def test_a_request_under_another_name_is_refused(server: Server) -> None:
    port = server.server_address[1]
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "[::2]"):
        assert ask(server, host=host)[0] == 421, host
        assert ask(server, "/status", host=host)[0] == 421, host
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert ask(server, "/status", host=host)[0] == 200, host


def test_other_hosts_are_refused_unless_asked_for(folder: Path) -> None:
    with pytest.raises(SpecError, match="--allow-other-hosts"):
        open_server([folder], host="0.0.0.0")
    done = CliRunner().invoke(app, ["serve", str(folder), "--host", "0.0.0.0"])
    assert done.exit_code == 2
    with open_server([folder], host="0.0.0.0", allow_other_hosts=True) as server:
        assert server.allowed is None
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("192.168.1.7")
    assert not is_loopback("example.org")


def test_a_port_that_is_taken_is_a_sentence(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(SpecError, match="cannot listen"):
            open_server([folder], port=other.getsockname()[1])


def test_the_command_prints_its_address_and_ends_cleanly(folder: Path) -> None:
    command = [sys.executable, "-c", "from anisoscope.cli import main; main()", "serve", str(folder)]
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A test run in the background inherits an ignored SIGINT, and would pass it on.
    piped["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, **piped) as process:
        try:
            assert process.stdout is not None
            address = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\n", process.stdout.readline())
            assert address
            connection = http.client.HTTPConnection("127.0.0.1", int(address[1]), timeout=60)
            connection.request("GET", "/status")
            assert connection.getresponse().status == 200
            connection.close()
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0, told
    assert "Traceback" not in told
