"""Worlds of several ranks that a test run starts itself, with one report for all of their ranks.

A test passes if it passes on every rank. A rank that fails or dies while the others wait for it ends its world after a bounded time: the report names
every rank's state and where it waits, and a new world goes on with the next test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpbridge.common.probe import free_port
from mpbridge.te_cpu.rank_server import PATIENCE, POLL

WORST = ("failed", "passed", "skipped")
"""Outcomes of a phase; the first one that any rank has is the test's."""
GRACE = 30.0
"""Seconds that the other ranks have for a test after one has failed or ended."""
STACK = 12
"""Lines of a waiting rank's stack that a report shows, up to pytest's own."""
THREADS = 16_000
"""Threads of its ranks with which a world goes on as a new one: half of those that Linux has numbers for (kernel.pid_max, 32,768 by default)."""
LAST = PATIENCE + 20.0
"""Seconds that the process which forks the ranks has to end."""
USUAL = (0, 1, 5)
"""pytest's exit statuses after a run: passed, failed, no tests."""


@dataclasses.dataclass
class _Rank:
    """What one rank has reported."""

    number: int
    folder: Path
    pid: int = 0
    at: int = 0
    """Read up to here."""
    now: str | None = None
    """The test that it is in."""
    since: float = 0.0
    status: int | None = None
    """Exit status, negative for a signal."""
    finished: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """Tests -> the reports of their phases."""
    phases: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    collected: list[str] = dataclasses.field(default_factory=list)
    broken: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Modules that could not be imported, or skip themselves."""
    location: Any = None

    def read(self) -> bool:
        """Takes in what is new, and whether it has ended; whether there was anything."""
        status, path = self.folder / f"{self.number}.status", self.folder / f"{self.number}.jsonl"
        ended = self.status is None and status.exists()
        if ended:
            self.status = int(status.read_text(encoding="ascii"))
        if not path.exists():
            return ended
        with path.open(encoding="utf-8") as file:
            file.seek(self.at)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self.at += len(whole.encode())
        for line in whole.splitlines():
            self._take(json.loads(line))
        return bool(whole) or ended

    def _take(self, row: dict[str, Any]) -> None:
        if "pid" in row:
            self.pid = row["pid"]
        elif "collected" in row:
            self.collected = row["collected"]
        elif "collect" in row:
            self.broken.append(row)
        elif "start" in row:
            self.now, self.location, self.phases, self.since = row["start"], row["location"], [], time.monotonic()
        elif "report" in row:
            self.phases.append(row["report"])
        else:
            self.finished[row["finish"]] = self.phases
            self.now, self.phases = None, []

    def failed(self, test: str) -> bool:
        """Whether a phase of the test has failed on this rank."""
        phases = self.finished.get(test, self.phases if self.now == test else [])
        return any(phase["outcome"] == "failed" for phase in phases)

    def is_past(self, test: str) -> bool:
        """Whether it will report nothing more of a test; it reports nothing of one that it did not collect."""
        return test in self.finished or (bool(self.collected) and test not in self.collected)

    def state(self, test: str) -> str:
        """Its state in the test, for the report of a world that was ended."""
        if test in self.finished:
            return "failed" if self.failed(test) else "finished"
        if self.status is not None:
            return f"ended by signal {-self.status}" if self.status < 0 else f"ended with status {self.status}"
        return "failed, and waits in teardown" if self.failed(test) else "waits"

    def stack(self) -> str:
        """Where it is, innermost call first; it is told to write that down."""
        path = self.folder / f"{self.number}.stack"
        with contextlib.suppress(ProcessLookupError, OSError):
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(4 * POLL)
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        lines = text.rpartition("Current thread")[2].partition("_pytest/python.py")[0].splitlines()[1:]
        return "\n".join([line for line in lines if "/_pytest/" not in line][:STACK])

    def threads(self) -> int:
        """How many it has; 0 where that cannot be read. A process group has some while anybody holds it: Megatron-LM's tests keep 100 to 200 groups each."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii", errors="replace")
            return int(status.rpartition("Threads:")[2].split()[0])
        except (OSError, IndexError):
            return 0

    def end(self) -> None:
        """Ends it and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.pid:
                os.killpg(self.pid, signal.SIGKILL)


@dataclasses.dataclass
class Merged:
    """A test over all ranks, or a module that was not collected."""

    test: str
    outcome: str
    text: str
    """Why it failed or was skipped, by rank."""
    seconds: float
    phases: list[dict[str, Any]]
    """The reports that stand for all ranks."""
    location: Any = None
    module: bool = False


class Ranks:
    """Starts worlds of `count` ranks that run pytest while `machine` is played with Transformer Engine `te`.

    preload: modules that are imported once, before the ranks are forked; only such as do not read the rank. grace: seconds that the other ranks have
    after one has failed. each: seconds for one test, over all ranks. Use it as a context.
    """

    def __init__(
        self, count: int, machine: str, te: str | None, *, preload: Sequence[str] = (), grace: float = GRACE, each: float = 600.0
    ) -> None:  # fmt: skip
        self.count, self.grace, self.each = count, grace, each
        path = [str(Path(place or ".").resolve()) for place in sys.path]
        settings = {"ranks": count, "machine": machine, "te": te, "preload": list(preload), "path": path}
        self._command = [sys.executable, "-m", "mpbridge.te_cpu.rank_server", json.dumps(settings)]
        # a variable that a launcher has set is not this world's
        gone = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        self._environment = {name: value for name, value in os.environ.items() if name not in gone}
        self._environment.setdefault("OMP_NUM_THREADS", "1")
        self._environment |= {"PYTHONPATH": os.pathsep.join(path), "MPBRIDGE_RANK": "1"}

    def __enter__(self) -> Ranks:
        self._folder = tempfile.TemporaryDirectory(prefix="mpbridge-ranks-", ignore_cleanup_errors=True)
        self._said = Path(self._folder.name, "server.txt").open("w+")
        self._server = subprocess.Popen(
            self._command, env=self._environment, stdin=subprocess.PIPE, stdout=self._said, stderr=self._said, text=True
        )  # fmt: skip
        self._worlds = 0
        return self

    def __exit__(self, *error: object) -> None:
        if self._server.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._server.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(LAST)  # it ends what the ranks have left
        self._server.kill()
        self._server.wait()
        self._said.close()
        self._folder.cleanup()

    def run(self, arguments: Sequence[str], limit: float | None = None, done: Sequence[str] = ()) -> Iterator[Merged]:
        """Runs pytest with `arguments` on all ranks, without the tests in `done`. limit: seconds for all; what has not run by then is left out.

        Raises RuntimeError if the process that forks the ranks ends.
        """
        over, seen, before = time.monotonic() + (limit or float("inf")), list(done), -1
        while len(seen) > before and time.monotonic() < over:
            before, self.unfinished = len(seen), False
            for merged in self._world(list(arguments), seen, over):
                seen.append(merged.test)
                yield merged
            if not self.unfinished:
                return

    def _begin(self, arguments: list[str], done: list[str]) -> list[_Rank]:
        self._worlds += 1
        folder = Path(self._folder.name, str(self._worlds))
        folder.mkdir()
        world = {"arguments": arguments, "done": done, "folder": str(folder), "port": free_port()}
        assert self._server.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._server.stdin.write(json.dumps(world) + "\n")
            self._server.stdin.flush()
        return [_Rank(number, folder) for number in range(self.count)]

    def _world(self, arguments: list[str], done: list[str], over: float) -> Iterator[Merged]:
        """One world, until all of its tests are told or it has to be ended."""
        ranks = self._begin(arguments, done)
        told: set[str] = set()
        hurt: dict[str, float] = {}
        try:
            while True:
                if self._server.poll() is not None:
                    self._said.seek(0)
                    raise RuntimeError(f"the process that forks the ranks has ended: {self._said.read()[-2000:]}")
                new = sum(rank.read() for rank in ranks)
                while (test := _open_test(ranks, told)) and all(rank.is_past(test) for rank in ranks):
                    told.add(test)
                    with (ranks[0].folder / "gate").open("a", encoding="utf-8") as gate:
                        gate.write(test + "\n")
                    yield merged_test(test, ranks)
                if new and told and sum(rank.threads() for rank in ranks) > THREADS:
                    self.unfinished = True
                    return
                if not new and all(rank.status is not None for rank in ranks):
                    yield from _modules(ranks, done, test)
                    if test:
                        yield stopped(test, "ranks have ended", ranks)
                        self.unfinished = True
                    return
                why = "no time is left" if time.monotonic() > over else self._stuck(test, ranks, hurt) if test else None
                if why:
                    self.unfinished = True
                    yield stopped(test or "before the first test", why, ranks)
                    return
                if not new:
                    time.sleep(POLL)
        finally:
            while any(rank.status is None for rank in ranks):
                for rank in ranks:
                    rank.read()
                    rank.end()
                if self._server.poll() is not None:
                    break
                time.sleep(POLL)

    def _stuck(self, test: str, ranks: list[_Rank], hurt: dict[str, float]) -> str | None:
        """Why a world has to be ended in this test, if it has to."""
        now = time.monotonic()
        since = [rank.since for rank in ranks if rank.now == test]
        if since and now - min(since) > self.each:
            return f"it took longer than {self.each:g} s"
        bad = [rank for rank in ranks if rank.failed(test) or (rank.status is not None and not rank.is_past(test))]
        if bad and now - hurt.setdefault(test, now) > self.grace:
            return f"rank {bad[0].number} {bad[0].state(test)}, and {self.grace:g} s later not all had finished"
        return None


def _modules(ranks: list[_Rank], done: list[str], test: str | None) -> Iterator[Merged]:
    """Modules that were not collected, once. Raises RuntimeError if there are none, and a rank has ended as pytest never does and outside of a test."""
    broken = {row["collect"]: row for rank in reversed(ranks) for row in rank.broken}
    if not broken and not test and (odd := next((rank for rank in ranks if rank.status not in USUAL), None)):
        said = (odd.folder / f"{odd.number}.txt").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"rank {odd.number} {odd.state('')}, and ran no test: {said[-3000:]}")
    for module, row in broken.items():
        if module not in done:
            yield Merged(module, row["outcome"], row["text"], 0.0, [], module=True)


def _open_test(ranks: list[_Rank], told: set[str]) -> str | None:
    """The first test that any rank has begun and that is not told."""
    begun = (test for rank in ranks for test in (*rank.finished, rank.now) if test and test not in told)
    return next(begun, None)


def merged_test(test: str, ranks: list[_Rank]) -> Merged:
    """One test of all ranks: each phase has the worst outcome, and the report of a rank that has it."""
    phases, texts, seconds = [], [], 0.0
    for when in ("setup", "call", "teardown"):
        of = [(rank, phase) for rank in ranks for phase in rank.finished.get(test, []) if phase["when"] == when]
        if not of:
            continue
        seconds += max(phase["duration"] for _, phase in of)
        worst = min((phase["outcome"] for _, phase in of), key=WORST.index)
        having = [(rank, phase) for rank, phase in of if phase["outcome"] == worst]
        chosen = having[0][1]
        if worst == "failed":
            names = ", ".join(str(rank.number) for rank, _ in having)
            if len(ranks) > 1:
                chosen["sections"] = [*chosen["sections"], ("ranks", f"failed on {names} of {len(ranks)}")]
            texts += [f"[{when}, rank {names} of {len(ranks)}] {text_of(chosen)}"]
        elif worst == "skipped":
            texts += [text_of(chosen)]
        phases.append(chosen)
    outcome = min((phase["outcome"] for phase in phases), key=WORST.index) if phases else "failed"
    if outcome == "passed" and any(phase["outcome"] == "skipped" for phase in phases):
        outcome = "skipped"
    location = phases[0]["location"] if phases else None
    return Merged(test, outcome, "\n".join(texts), seconds, phases, location)


def stopped(test: str, why: str, ranks: list[_Rank]) -> Merged:
    """A test in which its world was ended: what each rank did."""
    lines = [f"The world of {len(ranks)} was ended in this test: {why}."]
    for rank in ranks:
        lines.append(f"rank {rank.number}: {rank.state(test)}")
        phases = rank.finished.get(test, rank.phases if rank.now == test else [])
        lines += [text_of(phase) for phase in phases if phase["outcome"] == "failed"]
        if rank.status is None and test not in rank.finished:
            lines.append(rank.stack())
    text = "\n".join(lines)
    since = [rank.since for rank in ranks if rank.since]
    location = next((rank.location for rank in ranks if rank.now == test), (test.split("::")[0], 0, test))
    report = {
        "$report_type": "TestReport", "nodeid": test, "location": list(location), "keywords": {}, "outcome": "failed", "longrepr": text,
        "when": "call", "sections": [], "duration": 0.0, "start": 0.0, "stop": 0.0, "user_properties": [],
    }  # fmt: skip
    return Merged(test, "failed", text, time.monotonic() - min(since, default=time.monotonic()), [report], location)


def text_of(phase: dict[str, Any]) -> str:
    """A report's reason as text, its last lines first of all: the error and where it was raised."""
    told = phase["longrepr"]
    if isinstance(told, (list, tuple)):
        return str(told[-1])
    if isinstance(told, dict):
        crash = told.get("reprcrash") or {}
        entries = [entry for part in told["chain"] or [] for entry in part[0]["reprentries"]] if "chain" in told else []
        lines = [line for entry in entries for line in entry["data"].get("lines") or []]
        where = f"{crash.get('path')}:{crash.get('lineno')}"
        return "\n".join([f"{crash.get('message', '')} ({where})", *lines]) if crash else "\n".join(lines)
    return re.sub(r"\x1b\[[0-9;]*m", "", str(told))
