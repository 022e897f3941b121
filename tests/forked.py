"""Processes of their own that cost no import: forked from a server that has loaded megatron-core once and never trained."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from mpbridge.common.probe import free_port

ROOT = Path(__file__).parents[1]


class Forked:
    """`function(*arguments)` in a process of its own; what it prints, tracebacks included, is in `text`; with `apart`, its stderr is in `errors`.

    environment: all of its variables; this process's where not given.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        apart: bool = False,
    ) -> None:
        self._out = _file()
        self._err = _file() if apart else self._out
        own = {"OMP_NUM_THREADS": "1"} | dict(os.environ if environment is None else environment)
        self.process = _context().Process(target=_run, args=((self._out, self._err), own, function, arguments))
        self.process.start()
        self.text = self.errors = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self, seconds: float = 120) -> int:
        """The exit code (of a signal: negative). Raises AssertionError, with what was printed, where the process goes on."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running after {seconds} s: {said([self])}"
        self.read()
        return self.process.exitcode

    def wait_for(self, start: str, seconds: float = 120) -> None:
        """Returns when a line that starts so was printed."""
        stop = time.monotonic() + seconds
        while True:
            alive = self.process.is_alive()  # asked first: the line may be its last
            self.read()
            if any(line.startswith(start) for line in self.text.splitlines()):
                return
            assert alive, said([self])
            assert time.monotonic() < stop, f"no {start!r} within {seconds} s: {said([self])}"
            time.sleep(0.02)

    def read(self) -> None:
        """`text` and `errors` as they are now."""
        self.text, self.errors = (Path(file).read_text(errors="replace") for file in (self._out, self._err))

    def close(self) -> None:
        """Ends it and the processes that it started, whatever state they are in."""
        if self.process.is_alive():
            self.process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
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
def ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    apart: bool = False,
) -> Iterator[list[Forked]]:
    """The processes of one job, as torchrun would start them; ended with the block.

    What forks cannot show, tests/training/test_torchrun.py does: ranks that order their sets differently (forks share a hash seed) and how an interpreter ends.
    """
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), **meet}
    job = dict(os.environ if environment is None else environment) | job
    made: list[Forked] = []
    try:
        for rank in range(size):
            place = job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            made.append(Forked(function, *arguments, environment=place, apart=apart))
        yield made
    finally:
        for one in made:
            one.close()


def codes(job: Sequence[Forked], seconds: float = 120) -> list[int]:
    """Exit codes of all processes of a job; when one fails, the others are ended, as torchrun does.

    Raises AssertionError, with what all of them said, where they go on.
    """
    stop = time.monotonic() + seconds
    while any(one.process.is_alive() for one in job) and not any(one.process.exitcode for one in job):
        assert time.monotonic() < stop, f"still running after {seconds} s: {said(job)}"
        time.sleep(0.02)
    for one in job:
        one.process.terminate()
    for one in job:
        one.process.join(30)
        one.process.kill()
    return [one.wait(30) for one in job]


def said(job: Sequence[Forked]) -> str:
    """What the processes of a job have printed until now, for the message of a failure."""
    for one in job:
        one.read()
    return "\n".join(text[-6000:] for one in job for text in dict.fromkeys((one.text, one.errors)))


def python(
    argv: Sequence[str],
    *,
    size: int = 0,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout: float = 840.0,
) -> subprocess.CompletedProcess[str]:
    """What `python argv` leaves (a script, or "-m" and a module, and its arguments); with a `size`, what torchrun of that many ranks does.

    For what tests the work of such a process: nothing is imported again. What tests how a process starts, starts one. Raises AssertionError, with
    what was said until then, where it goes on.
    """
    call = (list(argv), str(cwd))
    with contextlib.ExitStack() as block:
        if size:
            running = block.enter_context(ranks(size, _main, *call, environment=env, apart=True))
        else:
            running = [block.enter_context(forked(_main, *call, environment=env, apart=True))]
        found = codes(running, timeout)
        texts = ["".join(getattr(one, kind) for one in running) for kind in ("text", "errors")]
    return subprocess.CompletedProcess(call[0], int(any(found)) if size else found[0], *texts)


def _main(argv: list[str], cwd: str) -> None:
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
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_the_suite, daemon=True).start()
    warnings.simplefilter("ignore")
    # the server has those of the test that was the first to ask for a process
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)


def _end_with_the_suite() -> None:
    """A suite that is killed closes nothing: its processes, and what they started, end when it does."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # the suite
    parent.join()
    os.killpg(0, signal.SIGKILL)
