"""When to audit: at once where something began anew, then every so many steps, or as often as a small share of the run's time allows."""

from __future__ import annotations

import math
import time

SHARE = 0.002
"""Of the run's time, for audits that repeat: two parts in a thousand, so that invariants (one and a half to two and a half) fit below five."""
SOONEST = 25
"""Steps between two audits at least, where time decides."""


class Cadence:
    """The steps that are audited. Steps are counted from 1.

    every: a number of steps, or None: by time. Time differs between ranks, so `next_by_time` is agreed upon by the caller.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        self.reason = "first update"
        """Why the next audit falls where it does."""
        self._pending = True
        self._next = 0
        self._usual = 0.0
        self._begun = 0.0

    def ask(self, reason: str) -> None:
        """The next step that applies an update is audited, whatever its number."""
        self._pending, self.reason = True, reason

    def due(self, step: int) -> bool:
        """Whether `step` is to be audited."""
        if self._pending:
            return True
        if self.every is not None:
            return self.every > 0 and step % self.every == 0
        return bool(self._next) and step >= self._next

    def begin(self) -> None:
        """A step begins."""
        self._begun = time.perf_counter()

    def end(self, *, watched: bool) -> float:
        """The step is over; seconds that it took beyond the usual one, where it was watched."""
        took = time.perf_counter() - self._begun
        if watched:
            return max(0.0, took - self._usual) if self._usual else took
        self._usual = took if not self._usual else min(self._usual * 1.05, 0.8 * self._usual + 0.2 * took)
        return 0.0

    def next_by_time(self, step: int, cost: float) -> int:
        """The next step at which an audit that costs so many seconds again stays within its share."""
        if not self._usual:
            return step + SOONEST
        return step + max(SOONEST, math.ceil(cost / (SHARE * self._usual)))

    def done(self, following: int) -> None:
        """An audit took place; where time decides, the next falls on step `following`."""
        self._pending, self._next = False, following
        self.reason = f"every {self.every} steps" if self.every else "by time"
