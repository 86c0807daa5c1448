"""One process that runs command after command: loading torch and transformers takes longer than tiny models do.

with Shell(environment) as shell:
    done = shell.run("sweep", "lab/tiny", "-o", "run")
    assert done.returncode == 0, done.stderr
"""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping

LIMIT = 400
"""Seconds that one command may take."""

APART = ("/bin/sh", "-c", '"$@"; exit $?', "sh")
"""Put before a command whose peak memory is read: a process begins with the peak of the one that starts it, and the
shell's is small."""

LOOP = """
import json, sys, traceback
from typer.testing import CliRunner
from anisoscope.cli import app
answers = sys.stdout
for line in sys.stdin:
    words = json.loads(line)
    done = CliRunner().invoke(app, words)
    crash = "" if done.exception is None or isinstance(done.exception, SystemExit) else done.exc_info
    stderr = done.stderr + ("".join(traceback.format_exception(*crash)) if crash else "")
    print(json.dumps([words, done.exit_code, done.stdout, stderr]), file=answers, flush=True)
"""


class Shell:
    """A process with variables of its own, such as the address of a hub, which are read once."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-c", LOOP]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=dict(environment), text=True, stdin=pipe, stdout=pipe)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """One command of `anisoscope`, as `subprocess.run` would tell of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        alarm = threading.Timer(LIMIT, self._process.kill)
        alarm.start()
        answer = self._process.stdout.readline()
        alarm.cancel()
        assert answer, f"the process ended with {self._process.wait()}"
        return subprocess.CompletedProcess(*json.loads(answer))

    def __enter__(self) -> "Shell":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=60)
        finally:
            self._process.kill()
