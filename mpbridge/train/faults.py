"""What can go wrong in a run and how the run then ends: signals, non-finite numbers, a rank that is gone."""

from __future__ import annotations

import json
import math
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from mpbridge.devices.together import agreed
from mpbridge.errors import BadValue, MpbridgeError, Refused
from mpbridge.train.base import Hook

if TYPE_CHECKING:
    from mpbridge.engines.contract import StepResult
    from mpbridge.train.base import Training
    from mpbridge.train.keeper import Keeper

EVENTS = "events.jsonl"
"""In the run's folder: one JSON object for everything that happened to the run besides steps."""


class LostRank(Refused):
    """Another rank of the job died or hangs."""


def record(training: Training, event: str, text: str, **facts: Any) -> None:
    """Prints `text` and adds it to the run's events; non-finite numbers are written as words."""
    training.say(text)
    folder = training.run.logger.get("log_dir")
    if folder and dist.get_rank() == 0:
        plain = {
            name: value if not isinstance(value, float) or math.isfinite(value) else str(value)
            for name, value in facts.items()
        }
        row = {"iteration": training.counters.iteration, "event": event, "text": text} | plain
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / EVENTS).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


class Signals(Hook):
    """SIGTERM and SIGINT end the run after the current step, the same one on all ranks; a second signal ends the process at once."""

    NUMBERS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.seen = 0
        self._kept: dict[int, Any] = {}

    def built(self, training: Training) -> None:
        """Installs the handlers, where this is the main thread."""
        if not self._kept and threading.current_thread() is threading.main_thread():
            self._kept = {number: signal.signal(number, self._note) for number in self.NUMBERS}

    def _note(self, number: int, frame: Any) -> None:
        self.seen = number
        # the system's own handler from now on: the second signal needs no Python to be running
        for known in self.NUMBERS:
            signal.signal(known, signal.SIG_DFL)

    def started(self, training: Training) -> None:
        """A signal that came while the run was built or loaded."""
        self._stop(training)

    def stepped(self, training: Training, result: StepResult) -> None:
        """Stops all ranks when one of them got a signal."""
        self._stop(training)

    def _stop(self, training: Training) -> None:
        number = agreed(self.seen)
        if number and training.stop is None:
            training.stop = signal.Signals(number).name
            record(training, "signal", f"{training.stop}: the step is finished, the run stops")

    def closed(self) -> None:
        """Restores the handlers."""
        for number, kept in self._kept.items():
            signal.signal(number, kept)
        self._kept = {}


class Nonfinite(Hook):
    """What follows a step whose loss or gradients are not finite (its update is never applied): skip it, stop, or go back to the last checkpoint."""

    def __init__(self, setting: str, keeper: Keeper) -> None:
        self.act, self.left = parse_nonfinite(setting)
        self.keeper = keeper
        self.before = 0
        if self.act == "rollback" and keeper.folder is None:
            raise BadValue(
                f"train.nonfinite={setting!r} needs checkpoints to go back to: set checkpoint.save and checkpoint.save_interval"
            )

    def started(self, training: Training) -> None:
        """Counts from what was loaded."""
        self.before = training.counters.nonfinite

    def stepped(self, training: Training, result: StepResult) -> None:
        """Acts on the step that was just counted; what is not finite is the counters' to say (an overflow that the loss scale handles is finite)."""
        if training.counters.nonfinite == self.before:
            return
        self.before = training.counters.nonfinite
        at, norm = training.counters.iteration, result.grad_norm
        what = f"loss {result.loss:g}, gradient norm {'not finite' if norm is None else format(norm, 'g')}"
        facts = {"loss": result.loss, "grad_norm": norm, "nonfinite_steps": training.counters.nonfinite}
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
        place = self.keeper.rewind(training) if self.left else None
        if place is None:
            why = "no rollback is left" if not self.left else "there is no checkpoint to go back to"
            training.stop = f"not finite, and {why}"
            record(training, "nonfinite", f"{text}: the run stops, {why}", **facts)
            return
        self.left -= 1
        record(
            training,
            "rollback",
            f"{text}: back to {place.name}, continuing after the samples that led there; {self.left} rollbacks left",
            **facts,
        )


def parse_nonfinite(setting: Any) -> tuple[Literal["skip", "stop", "rollback"], int]:
    """('skip', 0), ('stop', 0) or ('rollback', how many) from train.nonfinite; raises BadValue."""
    if setting in ("skip", "stop"):
        return setting, 0
    found = re.fullmatch(r"rollback (\d+)", str(setting))
    if found is None or not int(found[1]):
        raise BadValue(
            f"train.nonfinite={setting!r}: expected 'skip', 'stop' or 'rollback N' with N of at least 1 (how often a run may go back)"
        )
    return "rollback", int(found[1])


_GONE = (
    "closed by peer",
    "connection reset",
    "timed out",
    "timeout",
    "broken pipe",
    "no response",
    "unable to reach",
    "socket closed",
)


@contextmanager
def explained() -> Iterator[None]:
    """Turns what a process group raises when a rank is gone into LostRank, which says so."""
    try:
        yield
    except MpbridgeError:
        raise
    except RuntimeError as error:
        text = str(error)
        if dist.is_initialized() and dist.get_world_size() > 1 and any(word in text.lower() for word in _GONE):
            raise LostRank(
                f"rank {dist.get_rank()}: another rank of the job died or does not answer ({text.splitlines()[0][:200]}). "
                "Start the job again from its newest checkpoint (checkpoint.load=...); the reason is in that rank's output"
            ) from error
        raise
