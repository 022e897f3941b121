"""Checks and output before anything is built: capability, rules, the plan."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpbridge.common.errors import BadValue, MpbridgeError
from mpbridge.common.files import write
from mpbridge.common.probe import installed
from mpbridge.common.report.console import tell
from mpbridge.common.tables import processes
from mpbridge.planning.rules.base import Violation
from mpbridge.planning.rules.table import require_here
from mpbridge.precision.policy import LossScale

if TYPE_CHECKING:
    from rich.console import Console

    from mpbridge.settings.container import Run


def preflight(run: Run, out: Console) -> tuple[Violation, ...]:
    """Prints what the recipe decides, and the warnings; returns the warnings. Raises Refused, like `require_here`."""
    facts = run.facts
    machine, warnings = require_here(run.policy, facts)
    how = "natively" if facts.realization == "native" else "emulated"
    if run.played is not None:
        how = on_cpu(run)
    tell(
        out,
        f"recipe {run.recipe}, {how}, engine {facts.engine}, {processes(facts.parallel.world_size)} on {machine.name}"
        + (" (played)" if run.played is not None else ""),
    )
    out.print(run.plan.table())
    for setting in run.brought:
        tell(out, f"the recipe also sets {setting}")
    if warmup := scale_warmup(run.policy.loss_scale, run.train["train_iters"]):
        tell(out, warmup)
    for warning in warnings:
        tell(out, str(warning), style="yellow")
    return warnings


def on_cpu(run: Run) -> str:
    """By whom a run is computed that plays a GPU."""
    return f"by Transformer Engine {run.facts.versions.transformer_engine}'s own Python on the CPU"


def write_precision(run: Run, folder: Path | None) -> None:
    """Writes `folder`/precision.json: what was requested, decided and overridden, as JSON; does nothing if folder is None."""
    if folder is None:
        return
    facts = run.facts
    data = {
        "recipe": run.recipe,
        "engine": facts.engine,
        **run.plan.as_data(),
        "parallel": dataclasses.asdict(facts.parallel),
        "micro_batch_size": facts.micro_batch_size,
        "versions": dataclasses.asdict(installed()),
        "config": settings_of(run),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadValue(
            f"logger.log_dir={folder}: {error.strerror or error} (expected a folder, or a path where one can be created)"
        ) from None
    write(folder / "precision.json", json.dumps(data, indent=2, default=str) + "\n")


def settings_of(run: Run) -> dict[str, Any]:
    """The run's settings as data; empty for runs made from Python objects, which cannot be written to a file."""
    try:
        return run.container.as_data()
    except MpbridgeError:
        return {}


MODEST = 2.0**16
"""torch's own GradScaler starts there."""


def scale_warmup(scale: LossScale | None, steps: int | None = None) -> str:
    """What the first loss scale may cost a run of that many steps (None: not known), in a sentence; '' where it costs nothing."""
    most = scale.skips() if scale is not None else 0
    if scale is None or not most:
        return ""
    until = (
        f"{scale.skips(MODEST)} until 2**16, where torch's own starts, "
        if scale.minimum < MODEST < scale.initial
        else ""
    )
    short = f"; this run has {steps} steps" if steps is not None and steps <= most else ""
    cure = "; mixed_precision.initial_loss_scale=65536 starts lower" if until else ""
    return (
        f"the loss scale starts at {power(scale.initial)}, and steps that overflow are skipped: {until}at most {most} until its minimum of "
        f"{power(scale.minimum)}{short}{cure}"
    )


def power(scale: float) -> str:
    """A loss scale, from 1024 on as a power of two where it is one."""
    exponent = math.log2(scale)
    return f"2**{exponent:g}" if exponent.is_integer() and scale >= 1024 else f"{scale:g}"
