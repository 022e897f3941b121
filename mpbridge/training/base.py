"""How other code takes part in a run: a Hook is called on events and may act on the Training that it receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpbridge.backend.devices.collectives import rank
from mpbridge.training.checkpoint import store

if TYPE_CHECKING:
    from mpbridge.backend.engines.contract import Engine, StepResult
    from mpbridge.common.errors import MpbridgeError
    from mpbridge.common.report.progress import ProgressLine
    from mpbridge.settings.container import Run
    from mpbridge.training.data.batches import Feed
    from mpbridge.training.metrics import Counters


@dataclass(slots=True, kw_only=True)
class Training:
    """A run's state between two steps. Hooks may change it: a loaded checkpoint sets the counters, a schedule the engine."""

    run: Run
    engine: Engine
    scheduler: Any
    """megatron-core's OptimizerParamScheduler."""
    feed: Feed
    counters: Counters
    """Finished, skipped and non-finite steps, consumed samples: stored in checkpoints."""
    progress: ProgressLine | None = None
    stop: str | None = None
    """Set it to end the run after the current step; the text is the reason."""
    moved: bool = False
    """Set it after changing counters.consumed: the loop then continues reading from there."""
    next_run: Run | None = None
    """Set it to continue with another recipe: the loop rebuilds the engine before the next step."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Facts for the closing summary, by name."""
    measured: dict[str, float] = field(default_factory=dict)
    """Numbers of this step for the trackers, from hooks that measured it; cleared after each step."""
    audit: store.AuditMark = "unaudited"
    """The audit's result on the current state; written into each checkpoint. Automatic resuming skips suspect ones."""
    trouble: str | None = None
    """Set it on a rank that cannot write its files: all ranks stop after the current step, with a checkpoint."""
    failure: MpbridgeError | None = None
    """The exception raised once the last checkpoint is written."""

    def fail(self, error: MpbridgeError) -> None:
        """Ends the run after the current step and its last checkpoint; `pretrain` then raises `error` (only the first one)."""
        if self.failure is None:
            self.failure = error
            self.stop = self.stop or str(error).partition("\n")[0].removesuffix(":")

    def in_trouble(self, text: str) -> None:
        """Stops all ranks after the current step, with a checkpoint: a file of this rank cannot be written (only the first reason is kept)."""
        self.trouble = self.trouble or text

    def doubt(self, *, after: int) -> None:
        """Marks checkpoints after step `after` as suspect: the audit that called them good could not see a fault found since."""
        if (folder := self.run.checkpoint.get("save")) and rank() == 0:
            store.doubt(Path(folder), after=after)

    def last_good(self) -> str | None:
        """Name of the newest checkpoint that an audit found good."""
        folder = self.run.checkpoint.get("save")
        found = store.last_good(Path(folder)) if folder else None
        return None if found is None else found.path.name

    def say(self, text: str) -> None:
        """Prints a line, on rank 0."""
        if self.progress is not None:
            self.progress.say(text)


class Hook:
    """Base class of hooks; every method does nothing unless overridden. All ranks call the same methods in the same order."""

    def built(self, training: Training) -> None:
        """The engine is built and no step was done: load, or audit. Called again when a schedule rebuilds the engine."""

    def started(self, training: Training) -> None:
        """The run is about to take its next step for the first time."""

    def stepping(self, training: Training) -> None:
        """A step is about to be taken."""

    def stepped(self, training: Training, result: StepResult) -> None:
        """A step is finished and counted; result.applied tells whether weights were updated."""

    def evaluating(self, training: Training) -> None:
        """The held-out loss is about to be measured."""

    def evaluated(self, training: Training, loss: float) -> None:
        """The held-out loss was measured after the last counted step."""

    def finished(self, training: Training) -> None:
        """No further step will follow: the run is complete, or was stopped."""

    def closed(self) -> None:
        """The run is over, possibly by an exception: release resources."""


class Hooks(Hook):
    """Several hooks as one: a call reaches each in the given order; all are closed even if others fail."""

    def __init__(self, parts: Iterable[Hook]) -> None:
        self.parts = tuple(parts)

    def closed(self) -> None:
        """See Hook."""
        with ExitStack() as stack:
            for part in reversed(self.parts):
                stack.callback(part.closed)


def _each(name: str) -> Callable[..., None]:
    def call(self: Hooks, *args: Any) -> None:
        for part in self.parts:
            getattr(part, name)(*args)

    return call


for _name in ("built", "started", "stepping", "stepped", "evaluating", "evaluated", "finished"):
    setattr(Hooks, _name, _each(_name))
