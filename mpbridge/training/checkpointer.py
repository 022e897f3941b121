"""Checkpointer: loads the run's initial state, saves at intervals (in the background on request) and at the end, and prints the resume command."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mpbridge.backend.devices.together import on_first_rank
from mpbridge.common.report.metrics import record
from mpbridge.numerics.observation.operations import unobserved
from mpbridge.training.admission import beginning
from mpbridge.training.base import Hook
from mpbridge.training.checkpoint import io as checkpoint
from mpbridge.training.checkpoint import reader, store

if TYPE_CHECKING:
    from mpbridge.settings.container import Run
    from mpbridge.training.base import Training


class Checkpointer(Hook):
    """Checkpoints of one run, according to its checkpoint section. Raises CheckpointError on creation if saving could not work."""

    def __init__(self, run: Run) -> None:
        section = run.checkpoint
        self.folder = Path(section["save"]) if section.get("save") else None
        self.interval = int(section.get("save_interval") or 0)
        self.keep = {"keep_last": section.get("keep_last"), "keep_every": section.get("keep_every")}
        self.background = bool(section.get("async_save"))
        self.reset = bool(section.get("reset_optimizer"))
        self.saved_at: int | None = None
        self.pending: checkpoint.Writing | None = None
        self._begun, self._message = False, ""
        self._resumed: dict[str, Any] = {}
        self._moment: float | None = None
        self._claim: Any = None

    def built(self, training: Training) -> None:
        """Loads, on the first call."""
        if self._begun:
            return
        self._begun = True
        if (folder := self.folder) is not None:
            on_first_rank(lambda: self._take(folder))
        place, weights = beginning(training.run.checkpoint)
        own = place is not None and folder is not None and place.parent.resolve() == folder.resolve()
        if weights is not None:
            answer = checkpoint.load(training, weights, weights_alone=True)
            self._message = "\n".join([f"initialized with the weights of {weights}", *answer.lines()[1:]])
            self._resumed = {"checkpoint": str(weights), "verdict": "weights only", "optimizer_reset": True}
            training.notes["weights from"] = str(weights)
        if place is not None:
            answer = checkpoint.load(training, place, reset_optimizer=self.reset)
            self.saved_at = training.counters.iteration if own else None
            self._moment = answer.second_moment
            self._message = "\n".join([f"resumed from {place}: {answer.kind}", *answer.lines()[1:]])
            self._resumed = {"checkpoint": str(place), "verdict": answer.kind, "optimizer_reset": self.reset}
            training.notes["resumed from"] = str(place)

    def _take(self, folder: Path) -> None:
        self._claim = store.claim(folder)

    def started(self, training: Training) -> None:
        """Reports what was loaded, once progress output exists."""
        if self._message:
            record(training, "resumed", self._message, **self._resumed)
            self._message = ""

    def stepped(self, training: Training, result: Any) -> None:
        """Saves when due, and seals a checkpoint that was written in the background."""
        at = training.counters.iteration
        if self._moment is not None:
            self._compare(training)
        if self.pending is not None and self.pending.done():
            self._seal()
        if self.folder is not None and self.interval and at % self.interval == 0 and at != self.saved_at:
            self.save(training, background=self.background)

    def _compare(self, training: Training) -> None:
        """Once, behind the first step after a load: whether its optimizer had the states that were saved."""
        saved, self._moment = self._moment, None
        groups = getattr(training.engine.optimizer, "param_groups", ())
        beta2 = min((float(group["betas"][1]) for group in groups if group.get("betas")), default=None)
        with unobserved():
            found = reader.mean_second(training.engine)
        if beta2 is not None and (text := reader.lost(saved, found, beta2)):
            training.notes["optimizer states"] = "lost at the resume"
            record(training, "moments", text, saved=saved, found=found)

    def finished(self, training: Training) -> None:
        """Saves the last checkpoint, and prints the command that resumes."""
        if self.pending is not None:
            self._seal()
        if self.folder is None:
            if training.stop is not None:
                training.say("nothing was saved: checkpoint.save is not set")
            return
        if training.counters.iteration != self.saved_at:
            self.save(training, background=False)
        if training.stop is not None:
            training.notes["go on with"] = line = resume_line(self.folder)
            training.say(f"stopped after step {training.counters.iteration} ({training.stop}); to resume: {line}")

    def closed(self) -> None:
        """Discards an unfinished checkpoint, and releases the folder."""
        if self.pending is not None:
            self.pending.abort()
            self.pending = None
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def save(self, training: Training, *, background: bool) -> None:
        """Writes a checkpoint of the current state; newer checkpoints of an abandoned branch are renamed."""
        folder = self.folder
        assert folder is not None
        if self.pending is not None:  # wait for the previous one, so that at most one is being written
            self._seal()
        before = -1 if self.saved_at is None else self.saved_at
        for path in on_first_rank(lambda: store.set_aside(folder, after=before)):
            training.say(f"this run continued from step {before}: the checkpoint of a later step is kept as {path}")
        self.pending = checkpoint.save(training, folder, background=background)
        self.saved_at = training.counters.iteration
        if not background:
            self._seal()

    def rewind(self, training: Training) -> Path | None:
        """Loads the newest complete checkpoint of this run, except the data position; None if there is none."""
        if self.pending is not None:
            self._seal()
        folder = self.folder
        entry = on_first_rank(lambda: store.newest_whole(folder)) if folder is not None else None
        if entry is None:
            return None
        kept = {name: getattr(training.counters, name) for name in ("consumed", "tokens", "skipped", "nonfinite")}
        self._moment = checkpoint.load(training, entry.path).second_moment
        for name, value in kept.items():
            setattr(training.counters, name, value)
        training.moved = True
        self.saved_at = training.counters.iteration
        return entry.path

    def _seal(self) -> None:
        assert self.pending is not None
        pending, self.pending = self.pending, None
        pending.finish(**self.keep)


def resume_line(folder: Path) -> str:
    """The command that resumes from the newest checkpoint in `folder`."""
    setting = f"checkpoint.load={folder}"
    # only for the first start: repeated, it would drop the optimizer's states again
    once = ("checkpoint.load=", "checkpoint.reset_optimizer=", "--reset-optimizer")
    program, *rest = sys.argv
    single = not dist.is_initialized() or dist.get_world_size() == 1
    if single and os.path.basename(program).startswith("mpbridge"):
        words = [os.path.basename(program), *rest]
    elif single and "mpbridge.cli.main" in sys.modules:
        words = [os.path.basename(sys.orig_argv[0]), *sys.orig_argv[1:]]
    else:
        without = ", without --reset-optimizer" if any(word.startswith(once[1:]) for word in rest) else ""
        return f"the same command with {shlex.quote(setting)}{without}"
    return shlex.join([*(word for word in words if not word.startswith(once)), setting])
