"""Start small programs quickly: one Python imports mappnb, and each program is a fork of it that ends as any interpreter does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["Program", "Programs", "wait_until"]

_PARENT = r"""
import json, os, signal, sys
for name in json.loads(sys.argv[1]):
    __import__(name)
code = None
for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
    else:
        answer = os.fork()
        if answer == 0:
            break
    print(answer, flush=True)
else:
    os._exit(0)
os.setsid()
os.environ.update(request["env"])
for path, number in ((request["out"], 1), (request["err"], 2)):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
sys.argv = ["program"]
exec(compile(request["code"], "program", "exec"), {"__name__": "__main__"})
"""


class Program:
    """A running program."""

    def __init__(self, programs: Programs, pid: int, folder: Path) -> None:
        self._programs, self.pid, self.folder = programs, pid, folder

    def wait(self) -> int:
        """Exit status, negative for a signal."""
        return self._programs.ask(wait=self.pid)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    @property
    def out(self) -> str:
        """Its standard output until now."""
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        """Its standard error until now."""
        return (self.folder / "err").read_text()

    def wait_for(self, text: str, timeout_s: float = 30.0) -> None:
        """Wait until it has said ``text``."""
        wait_until(lambda: text in self.out, timeout_s, lambda: f"no {text!r} in {self.out!r}; stderr: {self.err}")


class Programs:
    """The process that the programs are forked from."""

    def __init__(self, folder: Path, *imports: str) -> None:
        self._folder, self._count = folder, 0
        self._pids: list[int] = []
        names = ["mappnb.capture.session", "mappnb.run", "pyarrow.parquet", "psutil", *imports]
        self._parent = subprocess.Popen(
            [sys.executable, "-c", _PARENT, json.dumps(names)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        )

    def ask(self, **request: Any) -> int:
        """Send one request; returns the answer."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(request) + "\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())

    def start(self, code: str, **env: str) -> Program:
        """Start a program."""
        self._count += 1
        folder = self._folder / f"program{self._count}"
        folder.mkdir(parents=True)
        for name in ("out", "err"):
            (folder / name).touch()
        pid = self.ask(code=code, env=env, out=str(folder / "out"), err=str(folder / "err"))
        self._pids.append(pid)
        return Program(self, pid, folder)

    def run(self, code: str, **env: str) -> Program:
        """Run a program to its good end."""
        program = self.start(code, **env)
        status = program.wait()
        assert status == 0, f"exit status {status}: {program.err}"
        return program

    def close(self) -> None:
        """End the parent, and what still runs."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.close()
        self._parent.wait()
        self._parent.stdout.close()
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_until(condition: Any, timeout_s: float = 20.0, message: Any = lambda: "in time") -> None:
    """Wait until ``condition()`` is true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, message()
        time.sleep(0.02)
