"""What a run saves and where it goes on: a Checkpointer loads its initial state, saves at intervals (in the background on request) and at the end, and prints the resume command;
the reaction to steps that are not finite; and schedules of recipes: the current stage, the rules over all stages before step 0, and the switch at a step boundary."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mpbridge.backend.devices.collectives import on_first_rank
from mpbridge.backend.engines.contract import StepResult
from mpbridge.backend.engines.registry import build_engine
from mpbridge.common.errors import Contradiction, MpbridgeError, Refused
from mpbridge.common.report.metrics import record
from mpbridge.numerics.observation.operations import unobserved
from mpbridge.planning.rules.base import Violation
from mpbridge.planning.rules.table import require_here
from mpbridge.settings.container import Run
from mpbridge.settings.training import parse_nonfinite
from mpbridge.training.admission import beginning, resume_point
from mpbridge.training.base import Hook, Training, scheduler
from mpbridge.training.checkpoint import io as checkpoint
from mpbridge.training.checkpoint import reader, store
from mpbridge.training.checkpoint.continuation import changes_of
from mpbridge.training.checkpoint.verdict import Verdict

_SWITCH = re.compile(r"recipe from step (\d+)")
"""The summary's notes of `switch`."""


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

    def built(self, training: Training) -> None:
        """Loads, on the first call."""
        if self._begun:
            return
        self._begun = True
        # one rank decides for all: on a node that does not see the folder a rank would begin anew, and wait for the others
        place, weights, own = on_first_rank(lambda: self._beginning(training.run.checkpoint))
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

    def _beginning(self, section: Mapping[str, Any]) -> tuple[Path | None, Path | None, bool]:
        place, weights = beginning(section)
        own = place is not None and self.folder is not None and place.parent.resolve() == self.folder.resolve()
        return place, weights, own

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
        # a rollback in the last step moved the place in the data, which the checkpoint does not have
        if training.counters.iteration != self.saved_at or training.moved:
            self.save(training, background=False)
        if training.stop is not None:
            training.notes["go on with"] = line = resume_line(self.folder, reset=self.reset)
            training.say(f"stopped after step {training.counters.iteration} ({training.stop}); to resume: {line}")

    def closed(self) -> None:
        """Discards an unfinished checkpoint."""
        if self.pending is not None:
            self.pending.abort()
            self.pending = None

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

    def rewind(self, training: Training) -> str:
        """Loads the newest complete checkpoint of this run, except the data position; its name, with what is lost; '' if there is none."""
        if self.pending is not None:
            self._seal()
        folder, last = self.folder, self.saved_at
        if folder is None or last is None:
            return ""
        # later ones are of a branch that this run did not take
        entry = on_first_rank(lambda: store.newest_whole(folder, until=last))
        if entry is None:
            return ""
        kept = {name: getattr(training.counters, name) for name in ("consumed", "tokens", "skipped", "nonfinite")}
        before = training.run
        if (stage := Stages(before).other(before, entry.step)) is not None:
            _build(training, stage)
        answer = checkpoint.load(training, entry.path)
        self._moment = answer.second_moment
        for name, value in kept.items():
            setattr(training.counters, name, value)
        training.moved = True
        self.saved_at = done = training.counters.iteration
        # the switches that it goes back past are undone
        for later in [note for note in training.notes if (at := _SWITCH.fullmatch(note)) and int(at[1]) > done + 1]:
            del training.notes[later]
        if stage is not None:
            _record_switch(training, before, answer)
        return entry.path.name + answer.loss

    def _seal(self) -> None:
        assert self.pending is not None
        pending, self.pending = self.pending, None
        pending.finish(**self.keep)


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
        place = self.checkpointer.rewind(training) if self.left else ""
        if not place:
            why = "no rollback is left" if not self.left else "there is no checkpoint to roll back to"
            training.stop = f"not finite, and {why}"
            record(training, "nonfinite", f"{text}: the run stops, {why}", **facts)
            return
        self.left -= 1
        left = f"continuing after the samples already read; {self.left} rollbacks left"
        record(training, "rollback", f"{text}: rolled back to {place}, {left}", **facts)


def resume_line(folder: Path, *, reset: bool = False) -> str:
    """The command that resumes from the newest checkpoint in `folder`. reset: the run's checkpoint.reset_optimizer, wherever it was set."""
    # only for the first start: repeated, it would drop the optimizer's states again
    settings = [f"checkpoint.load={folder}", *(["checkpoint.reset_optimizer=false"] if reset else [])]
    once = ("checkpoint.load=", "checkpoint.reset_optimizer=", "--reset-optimizer")
    program, *rest = sys.argv
    single = not dist.is_initialized() or dist.get_world_size() == 1
    if single and os.path.basename(program).startswith("mpbridge"):
        words = [os.path.basename(program), *rest]
    elif single and "mpbridge.cli.main" in sys.modules:
        words = [os.path.basename(sys.orig_argv[0]), *sys.orig_argv[1:]]
    else:
        without = ", without --reset-optimizer" if any(word.startswith(once[1:]) for word in rest) else ""
        return f"the same command with {shlex.join(settings)}{without}"
    return shlex.join([*(word for word in words if not word.startswith(once)), *settings])


def anchored(run: Run) -> Run:
    """`run` with the folders that it writes to as absolute paths: code of the user's that changes the working directory does not move them."""
    save, log = run.checkpoint.get("save"), run.logger.get("log_dir")
    checkpoint = run.checkpoint | ({"save": os.path.abspath(save)} if save else {})
    return dataclasses.replace(
        run, checkpoint=checkpoint, logger=run.logger | ({"log_dir": os.path.abspath(log)} if log else {})
    )


def at_stage(run: Run) -> Run:
    """`run` with the recipe of the stage of its first step: the first stage, or the one that its checkpoint is in."""
    if len(run.stages) < 2:
        return run
    place = resume_point(run.checkpoint)
    # another program's weights start at step 0
    own = place is not None and not reader.is_foreign(place) and not store.read_manifest(place).get("foreign")
    done = store.step_of(place) if place is not None and own else 0
    found = run.spans
    index = next((span.index for span in found if span.holds(done)), found[-1].index)
    return run.at(index)


def check_stages(run: Run, said: Collection[Violation] = ()) -> list[str]:
    """A line for each stage, with the warnings and overridden values that are its own, and for each transition of `run`; empty for a run with one recipe. said: warnings that were shown before.

    Raises Refused with every violation of a rule or of the machine's capability in any stage, and every transition that would lose the optimizer's states.
    """
    if len(run.stages) < 2:
        return []
    runs, overridden = run.by_stage(), {str(write) for write in run.plan.conflicts}
    faults, lines = [], []
    for span, made in zip(run.spans, runs, strict=True):
        lines.append(f"stage {span.index + 1}: {made.recipe}, steps {span.start + 1} to {span.stop}")
        new = [text for write in made.plan.conflicts if (text := str(write)) not in overridden]
        lines += [f"  overridden: {text}" for text in new]
        try:
            _, warnings = require_here(made.policy, made.facts)
        except MpbridgeError as error:
            faults.append(f"stage {span.index + 1} ({made.recipe}): {error}")
        else:
            lines += [f"  {warning}" for warning in warnings if warning not in said]
    for change in changes_of(runs):
        lines.append(f"  then {change}")
        faults += [change.fault] if change.fault else []
    if faults:
        raise Refused(str(Contradiction(faults, subject="the schedule of recipes cannot be run")))
    return lines


class Stages(Hook):
    """Requests the next stage's run when a stage is over; the loop then calls `switch`."""

    def __init__(self, run: Run) -> None:
        self.spans = run.spans if len(run.stages) > 1 else ()
        self.runs = run.by_stage()

    def other(self, now: Run, done: int) -> Run | None:
        """The run of the stage that the step after step `done` is in; None if that is `now`, or there is none."""
        wanted = next((self.runs[span.index] for span in self.spans if span.holds(done)), now)
        return wanted if (wanted.recipe, wanted.policy) != (now.recipe, now.policy) else None

    def stepped(self, training: Training, result: Any) -> None:
        """Sets `training.next_run` after the last step of a stage."""
        training.next_run = self.other(training.run, training.counters.iteration) or training.next_run


def switch(training: Training) -> None:
    """Closes the engine and continues with `training.next_run`, with main weights, moments and counters exactly as they were.

    The state passes through a checkpoint, so it is the one that a resume would load. Every rank must call it.
    """
    before, after = training.run, training.next_run
    assert after is not None
    folder = on_first_rank(lambda: store.room(before, "switch"))
    try:
        place = checkpoint.save(training, folder).finish()
        _build(training, after)
        answer = checkpoint.load(training, place)
    finally:
        on_first_rank(lambda: shutil.rmtree(folder, ignore_errors=True))
    _record_switch(training, before, answer)
    training.notes[f"recipe from step {training.counters.iteration + 1}"] = after.recipe


def _build(training: Training, run: Run) -> None:
    """Closes the engine and builds that of `run`, whose state is to be loaded; the loop shows it to the hooks."""
    training.engine.close()
    training.run, training.next_run = run, None
    training.engine = build_engine(run)
    training.scheduler = scheduler(run, training.engine.optimizer)


def _record_switch(training: Training, before: Run, answer: Verdict) -> None:
    done, old, new = training.counters.iteration, before.recipe, training.run.recipe
    text = f"step {done}: {old} -> {new}: {answer.short}"
    record(training, "recipe", text, before=old, after=new, verdict=answer.kind, lost=list(answer.lost))
