"""Processes of their own that cost no import: forked from a server that has loaded megatron-core once and never trained."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Forked:
    """`function(*arguments)` in a process of its own; what it prints, tracebacks included, is in `text`."""

    def __init__(
        self, function: Callable[..., Any], *arguments: Any, environment: dict[str, str] | None = None
    ) -> None:
        handle, self._out = tempfile.mkstemp(prefix="mpbridge-test-")
        os.close(handle)
        context = _context()
        self.process = context.Process(target=_run, args=(self._out, environment or {}, function, arguments))
        self.process.start()
        self.text = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self, seconds: float = 120) -> int:
        """The exit code (of a signal: negative). Raises AssertionError, with what was printed, where the process goes on."""
        self.process.join(seconds)
        self.text = Path(self._out).read_text()
        assert self.process.exitcode is not None, f"still running after {seconds} s: {self.text[-4000:]}"
        return self.process.exitcode

    def wait_for(self, start: str, seconds: float = 120) -> None:
        """Returns when a line that starts so was printed."""
        stop = time.monotonic() + seconds
        while not any(line.startswith(start) for line in Path(self._out).read_text().splitlines()):
            assert self.process.is_alive(), Path(self._out).read_text()[-4000:]
            assert time.monotonic() < stop, f"no {start!r} within {seconds} s"
            time.sleep(0.02)

    def close(self) -> None:
        """Ends it, whatever state it is in."""
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)
        Path(self._out).unlink(missing_ok=True)


@contextlib.contextmanager
def forked(
    function: Callable[..., Any], *arguments: Any, environment: dict[str, str] | None = None
) -> Iterator[Forked]:
    """One process, ended with the block."""
    made = Forked(function, *arguments, environment=environment)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def ranks(size: int, function: Callable[..., Any], *arguments: Any) -> Iterator[list[Forked]]:
    """The processes of one job, as torchrun would start them (tests/train/test_torchrun.py has the real one); ended with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    made = [
        Forked(function, *arguments, environment=job | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.warm"])
    kept = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    os.environ.update(PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, [kept["PYTHONPATH"]])]), OMP_NUM_THREADS="1")
    try:
        forkserver.ensure_running()
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _run(out: str, environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    handle = os.open(out, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(handle, number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[attr-defined]
    warnings.simplefilter("ignore")
    os.environ.update(environment)
    function(*arguments)
