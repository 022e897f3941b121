"""Faults of a run and how it then ends: signals, non-finite numbers, a lost rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mpbridge.backend.devices.collectives import agreed, is_of_a_lost_rank
from mpbridge.common.errors import MpbridgeError, Refused
from mpbridge.common.report.metrics import record
from mpbridge.settings.training import ANNOUNCED, parse_nonfinite
from mpbridge.training.base import Hook
from mpbridge.training.checkpoint.writer import end_with_parent

if TYPE_CHECKING:
    from mpbridge.backend.engines.contract import StepResult
    from mpbridge.training.base import Training
    from mpbridge.training.checkpointer import Checkpointer


_launcher = [os.getppid()]
"""The parent process at import time: if it dies while the run is built, this process gets another parent."""
os.register_at_fork(after_in_child=lambda: _launcher.__setitem__(0, os.getppid()))


class LostRank(Refused):
    """Another rank of the job died or hangs."""


class Signals(Hook):
    """Signals end the run after the current step, on all ranks at the same step, with a checkpoint.

    SIGTERM and SIGINT: a second one ends the process immediately. SIGHUP, SIGUSR1 and SIGUSR2 (Slurm's notice) may be repeated. A signal
    inherited as ignored stays ignored (nohup), unless the environment announces it. Under torchrun, a dying launcher also notifies its ranks.
    """

    URGENT = (signal.SIGTERM, signal.SIGINT)
    NOTICES = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

    def __init__(self) -> None:
        self.seen = 0
        self._urgent_at: float | None = None
        self._kept: dict[int, Any] = {}

    def built(self, training: Training) -> None:
        """Installs the handlers, if this is the main thread."""
        if self._kept or threading.current_thread() is not threading.main_thread():
            return
        for number in (*self.URGENT, *self.NOTICES):
            if signal.getsignal(number) is not signal.SIG_IGN or number.name == f"SIG{os.environ.get(ANNOUNCED)}":
                self._kept[number] = signal.signal(number, self._note)
        if under_torchrun() and (notice := next((n for n in self.NOTICES if n in self._kept), None)):
            end_with_parent(notice)
            if os.getppid() != _launcher[0]:  # it died before the request
                self.seen = notice

    def _note(self, number: int, frame: Any) -> None:
        self.seen = self.seen or number
        if number not in self.URGENT:
            return
        now = time.monotonic()
        if not under_torchrun():
            # use the default handler from now on, so that a second signal works even while Python is blocked
            self._restore_urgent()
        elif self._urgent_at is not None and now - self._urgent_at > PASSED_ON_WITHIN:
            self._restore_urgent()
            os.kill(os.getpid(), number)
        self._urgent_at = self._urgent_at or now

    def _restore_urgent(self) -> None:
        for known in self.URGENT:
            if known in self._kept:
                signal.signal(known, signal.SIG_DFL)

    def started(self, training: Training) -> None:
        """Handles a signal that arrived while the run was built or loaded."""
        self._stop(training)

    def stepped(self, training: Training, result: StepResult) -> None:
        """Stops all ranks if one of them received a signal or cannot write its files."""
        self._stop(training)

    def _stop(self, training: Training) -> None:
        found = agreed(TROUBLE if training.trouble else self.seen)
        if not found or training.stop is not None:
            return
        if found == TROUBLE:
            training.stop = training.trouble or "another rank cannot write its files"
            record(training, "trouble", f"{training.stop}: the step was completed, the run stops")
        else:
            training.stop = signal.Signals(found).name
            record(training, "signal", f"{training.stop}: the step was completed, the run stops")

    def closed(self) -> None:
        """Restores the handlers."""
        for number, kept in self._kept.items():
            signal.signal(number, kept)
        if self._kept and under_torchrun():
            end_with_parent(0)
        self._kept = {}


TROUBLE = 1000
"""Code larger than any signal number: files cannot be written."""
PASSED_ON_WITHIN = 5.0
"""Seconds within which torchrun may pass on a signal that the terminal also sent to its ranks; not a second request."""


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class Nonfinite(Hook):
    """The reaction to a step whose loss or gradients are not finite (its update is never applied): skip it, stop, or roll back to the last checkpoint."""

    def __init__(self, setting: str, checkpointer: Checkpointer) -> None:
        self.act, self.left = parse_nonfinite(setting)
        self.checkpointer = checkpointer
        self.before = 0

    def started(self, training: Training) -> None:
        """Starts counting from the loaded state."""
        self.before = training.counters.nonfinite

    def stepped(self, training: Training, result: StepResult) -> None:
        """Acts on the step just counted; the counters decide what is not finite (an overflow that the loss scale handles is not counted)."""
        if training.counters.nonfinite == self.before:
            return
        self.before = training.counters.nonfinite
        at, norm = training.counters.iteration, result.grad_norm
        what = f"loss {result.loss:g}, gradient norm {'not finite' if norm is None else format(norm, 'g')}"
        facts: dict[str, Any] = {"loss": result.loss, "grad_norm": norm, "nonfinite_steps": training.counters.nonfinite}
        text = f"step {at} is not finite ({what}; {training.counters.nonfinite} such steps so far)"
        training.notes["non-finite steps"] = training.counters.nonfinite
        if self.act == "skip":
            record(training, "nonfinite", f"{text}: its update was skipped", **facts)
        elif self.act == "stop":
            training.stop = f"step {at} is not finite"
            record(training, "nonfinite", f"{text}: the run stops (train.nonfinite=stop)", **facts)
        else:
            self._back(training, text, facts)

    def _back(self, training: Training, text: str, facts: dict[str, Any]) -> None:
        place = self.checkpointer.rewind(training) if self.left else None
        if place is None:
            why = "no rollback is left" if not self.left else "there is no checkpoint to roll back to"
            training.stop = f"not finite, and {why}"
            record(training, "nonfinite", f"{text}: the run stops, {why}", **facts)
            return
        self.left -= 1
        record(
            training,
            "rollback",
            f"{text}: rolled back to {place.name}, continuing after the samples already read; {self.left} rollbacks left",
            **facts,
        )


@contextmanager
def explained() -> Iterator[None]:
    """Converts what a process group raises for a lost rank to LostRank."""
    try:
        yield
    except MpbridgeError:
        raise
    except RuntimeError as error:
        if is_of_a_lost_rank(error):
            raise LostRank(
                f"rank {dist.get_rank()}: another rank of the job died or does not answer ({str(error).splitlines()[0][:200]}). "
                "Restart the job from its newest checkpoint (checkpoint.load=...); the reason is in that rank's output"
            ) from error
        raise
