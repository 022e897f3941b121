"""When steps are audited: a number of steps apart, or by the time that an audit takes."""

from __future__ import annotations

import math
import time

SHARE = 0.002
"""Share of the run's time for repeated audits: 0.2 %, so that together with the invariants (0.15 to 0.25 %) they stay below 0.5 %."""
SOONEST = 25
"""Minimum number of steps between two audits when they are scheduled by time."""
LATEST = 250
"""Maximum: a fault is found within so many steps, whatever an audit costs. bench_audit.py: at most about one step in any recipe, 0.4 % of a run."""


class Cadence:
    """The steps that are audited. Steps are counted from 1.

    every: a number of steps, or None: by time. Timings differ between ranks, so the caller makes all ranks agree on `next_by_time`.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        self.reason = "first update"
        """Why the next audit is due."""
        self._pending = True
        self._next = 0
        self._usual = 0.0
        self._begun = 0.0

    def ask(self, reason: str) -> None:
        """Requests an audit of the next step that applies an update, regardless of its number."""
        self._pending, self.reason = True, reason

    def due(self, step: int) -> bool:
        """Whether `step` is to be audited."""
        if self._pending:
            return True
        if self.every is not None:
            return self.every > 0 and step % self.every == 0
        return bool(self._next) and step >= self._next

    def begin(self) -> None:
        """Marks the beginning of a step."""
        self._begun = time.perf_counter()

    def end(self, *, watched: bool) -> float:
        """Marks the end of a step. Returns the extra seconds that it took over an ordinary step, if it was watched."""
        took = time.perf_counter() - self._begun
        if watched:
            return max(0.0, took - self._usual) if self._usual else took
        self._usual = took if not self._usual else min(self._usual * 1.05, 0.8 * self._usual + 0.2 * took)
        return 0.0

    def next_by_time(self, step: int, cost: float) -> int:
        """The next step at which another audit of that many seconds stays within its share."""
        if not self._usual:
            return step + SOONEST
        return step + min(LATEST, max(SOONEST, math.ceil(cost / (SHARE * self._usual))))

    def done(self, following: int) -> None:
        """Records an audit; when audits are scheduled by time, the next one is due at step `following`."""
        self._pending, self._next = False, following
        self.reason = f"every {self.every} steps" if self.every else "by time"
