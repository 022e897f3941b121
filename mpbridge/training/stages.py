"""Schedules of recipes in a run: the current stage, the rules over all stages before step 0, and the switch at a step boundary."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpbridge.backend.devices.collectives import on_first_rank
from mpbridge.backend.engines.registry import build_engine
from mpbridge.common.errors import Contradiction, MpbridgeError, Refused
from mpbridge.common.report.metrics import record
from mpbridge.planning.rules.table import require_here
from mpbridge.precision.schedule import Span, spans
from mpbridge.training.admission import resume_point
from mpbridge.training.base import Hook
from mpbridge.training.checkpoint import io as checkpoint
from mpbridge.training.checkpoint import store
from mpbridge.training.checkpoint.continuation import of_run
from mpbridge.training.checkpoint.verdict import Verdict, verdict
from mpbridge.training.lr import scheduler

if TYPE_CHECKING:
    from mpbridge.settings.container import Run
    from mpbridge.training.base import Training


def spans_of(run: Run) -> tuple[Span[Any], ...]:
    """The stages of a run as step ranges. Raises Contradiction if they do not fit its length."""
    train = run.train
    tokens = int(train["global_batch_size"]) * run.facts.shape.seq_length
    return spans(run.stages, steps=int(train["train_iters"]), tokens_per_step=tokens)


def stage_run(run: Run, index: int) -> Run:
    """`run` with the recipe of its stage `index`; everything else, including the list of stages, unchanged. Raises Contradiction."""
    container = run.container.copy()
    given: Any = run.container.mixed_precision
    part = given[index]
    container.mixed_precision = (
        {name: value for name, value in part.items() if name != "until"} if isinstance(part, Mapping) else part
    )
    container.engine = run.facts.engine
    made = container.resolved(run.facts.parallel.world_size, run.facts.machine, run.facts.versions)
    return dataclasses.replace(made, container=run.container, stages=run.stages)


def at_stage(run: Run) -> Run:
    """`run` with the recipe of the stage of its first step: the first stage, or the one that its checkpoint is in."""
    if len(run.stages) < 2:
        return run
    place = resume_point(run.checkpoint)
    done = store.step_of(place) if place is not None else 0
    found = spans_of(run)
    index = next((span.index for span in found if span.holds(done)), found[-1].index)
    return stage_run(run, index)


def check_stages(run: Run) -> list[str]:
    """A line for each stage and transition of `run`; empty for a run with one recipe.

    Raises Refused with every violation of a rule or of the machine's capability in any stage, and every transition that would lose the optimizer's states.
    """
    if len(run.stages) < 2:
        return []
    runs = [stage_run(run, span.index) for span in spans_of(run)]
    faults, lines = [], []
    for span, made in zip(spans_of(run), runs, strict=True):
        try:
            require_here(made.policy, made.facts)
        except MpbridgeError as error:
            faults.append(f"stage {span.index + 1} ({made.recipe}): {error}")
        lines.append(f"stage {span.index + 1}: {made.recipe}, steps {span.start + 1} to {span.stop}")
    for index, (before, after) in enumerate(itertools.pairwise(runs), start=1):
        answer = verdict(of_run(before), of_run(after))
        lines.append(f"  then {before.recipe} -> {after.recipe}: {_short(answer)}")
        if not answer.goes_on:
            faults.append(
                f"from stage {index} to {index + 1} ({before.recipe} -> {after.recipe}): {'; '.join(answer.why)}"
            )
    if faults:
        raise Refused(str(Contradiction(faults, subject="the schedule of recipes cannot be run")))
    return lines


def _short(answer: Verdict) -> str:
    return answer.kind + (f" (lost: {'; '.join(answer.lost)})" if answer.lost else "")


class Stages(Hook):
    """Requests the next stage's run when a stage is over; the loop then calls `switch`."""

    def __init__(self, run: Run) -> None:
        self.spans = spans_of(run) if len(run.stages) > 1 else ()
        self.runs = [stage_run(run, span.index) for span in self.spans]

    def stepped(self, training: Training, result: Any) -> None:
        """Sets `training.next_run` after the last step of a stage (also if a rollback went back past a switch)."""
        done = training.counters.iteration
        index = next((span.index for span in self.spans if span.holds(done)), None)
        if index is None:
            return
        wanted, now = self.runs[index], training.run
        if (wanted.recipe, wanted.policy) != (now.recipe, now.policy):
            training.next_run = wanted


def switch(training: Training) -> None:
    """Closes the engine and continues with `training.next_run`, with main weights, moments and counters exactly as they were.

    The state passes through a checkpoint, so it is the one that a resume would load. Every rank must call it.
    """
    before, after = training.run, training.next_run
    assert after is not None
    folder = on_first_rank(lambda: store.room(before, "switch"))
    try:
        place = checkpoint.save(training, folder).finish()
        training.engine.close()
        training.run, training.next_run = after, None
        training.engine = build_engine(after)
        training.scheduler = scheduler(after, training.engine.optimizer)
        answer = checkpoint.load(training, place)
    finally:
        on_first_rank(lambda: shutil.rmtree(folder, ignore_errors=True))
    text = f"step {training.counters.iteration}: {before.recipe} -> {after.recipe}: {_short(answer)}"
    record(
        training, "recipe", text, before=before.recipe, after=after.recipe, verdict=answer.kind, lost=list(answer.lost)
    )
    training.notes[f"recipe from step {training.counters.iteration + 1}"] = after.recipe
