"""The process that `ranks.Ranks` starts: it imports torch and Transformer Engine once and forks the ranks of each world, which run pytest.

`python -m mpbridge.te_cpu.rank_server SETTINGS` reads a line of JSON for each world, and writes each rank's exit status into the world's folder.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from mpbridge.te_cpu.context import transformer_engine_on_cpu
from mpbridge.te_cpu.foreign import foreign_code

POLL = 0.05
"""Seconds between two looks at a file."""
PATIENCE = 0.5
"""Seconds that processes which a rank has left have to end: multiprocessing's resource tracker ignores a request, and cleans up when its last client ends."""


class Reporter:
    """Plugin of one rank: it writes what happens as JSON lines; a rank whose test failed waits until the others have finished it, so that its
    next collective does not answer an earlier one of theirs."""

    def __init__(self, out: IO[str], done: frozenset[str], gate: Path) -> None:
        self.out, self.done, self.gate = out, done, gate
        self.failed, self.config = False, None

    def write(self, **row: Any) -> None:
        """One line, at once."""
        self.out.write(json.dumps(row, default=str) + "\n")
        self.out.flush()

    def pytest_configure(self, config: Any) -> None:
        """Keeps the configuration, whose hook makes reports of plain data."""
        self.config = config

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leaves out what an earlier world has run."""
        items[:] = [item for item in items if item.nodeid not in self.done]
        self.write(collected=[item.nodeid for item in items])

    def pytest_collectreport(self, report: Any) -> None:
        """A module that cannot be imported, or skips itself."""
        if not report.passed:
            self.write(collect=report.nodeid, outcome=report.outcome, text=str(report.longrepr))

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        """The test that the rank is in."""
        self.failed = False
        self.write(start=nodeid, location=location)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase of it."""
        self.failed |= report.failed
        hook = self.config.hook  # type: ignore[attr-defined]
        self.write(report=hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Its end."""
        self.write(finish=nodeid)
        while self.failed and not (self.gate.exists() and nodeid in self.gate.read_text(encoding="utf-8").split("\n")):
            time.sleep(POLL)


def _end_with_parent() -> None:
    """Has the kernel end this process when its parent ends, whatever it waits for (Linux; elsewhere it ends after its test)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def _as_rank(world: dict[str, Any], rank: int) -> int:
    """In a forked process: runs the tests as one rank of a world. Returns pytest's exit status."""
    _end_with_parent()
    os.setsid()  # what it starts ends with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(world["folder"])
    said = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(said, stream)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(world["port"])}
    with (folder / f"{rank}.jsonl").open("a", encoding="utf-8") as out, (folder / f"{rank}.stack").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
        reporter = Reporter(out, frozenset(world["done"]), folder / "gate")
        reporter.write(pid=os.getpid())
        # its own faulthandler would take the place of ours
        return int(pytest.main([*world["arguments"], "-p", "no:faulthandler"], plugins=[reporter]))


def _end_what_is_left(groups: list[int]) -> None:
    """Ends what ranks have started and left, such as a checkpoint's writer."""
    left = [group for group in groups if _signalled(group, signal.SIGTERM)]
    until = time.monotonic() + PATIENCE
    while left and time.monotonic() < until:
        time.sleep(POLL)
        left = [group for group in left if _signalled(group, 0)]
    for group in left:
        _signalled(group, signal.SIGKILL)


def _signalled(group: int, number: int) -> bool:
    """Whether a process of the group was there to get it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _fork(world: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        status = _as_rank(world, rank)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # the server's own exit handlers are not this rank's


def main() -> None:
    """Forks the ranks of every world that is asked for, until the input ends."""
    _end_with_parent()
    settings = json.loads(sys.argv[1])
    sys.path[:] = settings["path"]
    # torch's CPU operations of ranks that share a few cores, and the pool of threads that a fork would lose
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": str(settings["ranks"]), "LOCAL_WORLD_SIZE": str(settings["ranks"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"}
    with transformer_engine_on_cpu(settings["machine"], te=settings["te"]), foreign_code(connections=False):
        for name in ("transformer_engine.pytorch", *settings["preload"]):
            with contextlib.suppress(Exception), warnings.catch_warnings():  # the tests say what is missing
                warnings.simplefilter("ignore")
                importlib.import_module(name)
        for line in sys.stdin:
            world = json.loads(line)
            ranks = {_fork(world, rank): rank for rank in range(settings["ranks"])}
            groups = list(ranks)
            while ranks:
                pid, status = os.wait()
                if pid in ranks:
                    place = Path(world["folder"], f"{ranks.pop(pid)}.status")
                    place.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(status)), encoding="ascii")
                    place.with_suffix(".new").rename(place)
            _end_what_is_left(groups)


if __name__ == "__main__":
    main()
