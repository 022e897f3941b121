"""What the verbs before a run say of a schedule of recipes: a row for each stage, which is judged alone (`planning.outlook.Schedule`), and each switch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mpbridge.cli.text import print_line, print_table
from mpbridge.common.errors import MpbridgeError
from mpbridge.common.tables import size
from mpbridge.planning.rules.base import BETWEEN_STAGES, Violation
from mpbridge.settings.container import Run

if TYPE_CHECKING:
    from mpbridge.planning.outlook import Outlook  # slow, and plan and launch ask for names and switches alone


def names_of(made: Run) -> str:
    """The recipe, or those of the stages in order."""
    return ", then ".join(stage.recipe for stage in made.stages) or made.recipe


def title(made: Run) -> str:
    """'recipe bf16_mixed', or 'recipes' and those of the stages."""
    return f"recipe{'s' * (len(made.stages) > 1)} {names_of(made)}"


def stage_names(made: Run) -> list[str]:
    """'stage 2 (bf16_mixed)' of each; [''] without a schedule."""
    if len(made.stages) < 2:
        return [""]
    return [f"stage {number} ({stage.recipe})" for number, stage in enumerate(made.stages, start=1)]


def lost_states(runs: Sequence[Run]) -> Iterator[Violation]:
    """An error for each switch between stages that the optimizer's states do not survive."""
    if len(runs) < 2:
        return
    from mpbridge.training.checkpoint.continuation import changes_of  # slow, and few runs have a schedule

    for change in changes_of(runs):
        if change.fault:
            yield BETWEEN_STAGES.broken(change.fault)


def schedule_data(made: Run, outlook: Outlook) -> list[dict[str, Any]]:
    """Each stage and its answers as JSON types; empty without a schedule."""
    if not outlook.stages:
        return []
    from mpbridge.training.checkpoint.continuation import changes_of

    then = [change.verdict.short for change in changes_of(made.by_stage())]
    shares, full = made.shares or [None] * len(made.stages), None
    with contextlib.suppress(MpbridgeError):
        full = outlook.fullest
    return [
        {
            "recipe": stage.recipe, "until": None if stage.until is None else str(stage.until), "share": share,
            "errors": [violation.rule for violation in one.errors], "runs": one.capability.how,
            "needed": _needed(one), "answer": one.answer, "fullest": one is full,
            "seconds": None if one.no_time else one.time.seconds, "then": change,
        }
        for stage, share, one, change in zip(made.stages, shares, outlook.stages, [*then, None], strict=True)
    ]  # fmt: skip


def _needed(one: Outlook) -> int | None:
    with contextlib.suppress(MpbridgeError):
        return one.memory.needed
    return None


def print_schedule(made: Run, outlook: Outlook) -> None:
    """The same as a table, followed by an empty line; nothing without a schedule."""
    rows = [
        (
            str(number), row["recipe"], "" if row["share"] is None else f"{row['share']:.0%}",
            "yes" if not row["errors"] else f"no: {', '.join(row['errors'])}", row["runs"],
            ", ".join(filter(None, [row["needed"] and size(row["needed"]), row["answer"]])),
            "" if row["seconds"] is None else f"{row['seconds']:.3g} s", row["then"] or "",
        )
        for number, row in enumerate(schedule_data(made, outlook), start=1)
    ]  # fmt: skip
    if rows:
        columns = ("stage", "recipe", "share of steps", "valid", "runs", "memory", "step", "to the next")
        print_table(columns, rows, title="stages, each judged alone")
        print_line()
