"""Processes of their own that cost no import: forked from a server that has loaded megatron-core once and never trained."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
JOB = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each rank."""


class Forked:
    """`function(*arguments)` in a process of its own; what it prints, tracebacks included, is in `text`; with `apart`, its stderr is in `errors`."""

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        apart: bool = False,
    ) -> None:
        self._out = _file()
        self._err = _file() if apart else self._out
        context = _context()
        outputs = (self._out, self._err)
        self.process = context.Process(target=_run, args=(outputs, dict(environment or {}), function, arguments))
        self.process.start()
        self.text = self.errors = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self, seconds: float = 120) -> int:
        """The exit code (of a signal: negative). Raises AssertionError, with what was printed, where the process goes on."""
        self.process.join(seconds)
        self.text, self.errors = Path(self._out).read_text(), Path(self._err).read_text()
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
        for file in {self._out, self._err}:
            Path(file).unlink(missing_ok=True)


@contextlib.contextmanager
def forked(
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    apart: bool = False,
) -> Iterator[Forked]:
    """One process, ended with the block."""
    made = Forked(function, *arguments, environment=environment, apart=apart)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def ranks(size: int, function: Callable[..., Any], *arguments: Any, apart: bool = False) -> Iterator[list[Forked]]:
    """The processes of one job, as torchrun would start them (tests/train/test_torchrun.py has the real one); ended with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    made: list[Forked] = []
    try:
        for rank in range(size):
            place = job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            made.append(Forked(function, *arguments, environment=place, apart=apart))
        yield made
    finally:
        for one in made:
            one.close()


def python(
    argv: Sequence[str],
    *,
    size: int = 0,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout: float = 280.0,
) -> subprocess.CompletedProcess[str]:
    """What `python argv` leaves (a script, or "-m" and a module, and its arguments); with a `size`, what torchrun of that many ranks does.

    For what tests the work of such a process: nothing is imported again. What tests how a process starts, starts one. Raises TimeoutExpired with
    what was said until then.
    """
    call = (list(argv), dict(os.environ if env is None else env), str(cwd))
    stop = time.monotonic() + timeout
    with contextlib.ExitStack() as block:
        if size:
            running = block.enter_context(ranks(size, _main, *call, apart=True))
        else:
            running = [block.enter_context(forked(_main, *call, apart=True))]
        while any(one.process.is_alive() for one in running) and not any(one.process.exitcode for one in running):
            if time.monotonic() > stop:
                said = ["".join(Path(file).read_text() for file in files) for files in zip(*((one._out, one._err) for one in running), strict=True)]  # fmt: skip
                raise subprocess.TimeoutExpired(call[0], timeout, *said)
            time.sleep(0.02)
        if any(one.process.exitcode for one in running):
            for one in running:
                one.process.terminate()
        codes = [one.wait(30) for one in running]
        status = int(any(codes)) if size else codes[0]
        texts = ["".join(getattr(one, kind) for one in running) for kind in ("text", "errors")]
    return subprocess.CompletedProcess(call[0], status, *texts)


def _main(argv: list[str], env: dict[str, str], cwd: str) -> None:
    place = {name: os.environ[name] for name in JOB if name in os.environ}
    os.environ.clear()
    os.environ.update(env | place)
    os.chdir(cwd)
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        runpy.run_path(argv[0], run_name="__main__")


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
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


def _file() -> str:
    handle, name = tempfile.mkstemp(prefix="mpbridge-test-")
    os.close(handle)
    return name


def _run(
    outputs: tuple[str, str], environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    for number, name in enumerate(outputs, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[attr-defined]
    warnings.simplefilter("ignore")
    os.environ.update(environment)
    function(*arguments)
