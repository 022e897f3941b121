"""The summary of a finished run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpbridge.common.errors import CheckpointError
from mpbridge.common.files import why, write
from mpbridge.common.report.console import warn
from mpbridge.training.preflight import settings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a run, identical on every rank except the times."""

    recipe: str
    iterations: int
    """Finished steps, including those before a resume."""
    skipped: int
    nonfinite: int
    consumed_samples: int
    first_loss: float | None
    """Loss of this process's first step; None if it took none."""
    last_loss: float | None
    """Mean loss over this process's last `averaged` steps."""
    averaged: int = 10
    eval_losses: tuple[tuple[int, float], ...] = ()
    """(step, held-out loss), in order."""
    seconds: float = 0.0
    """Seconds in training steps, without evaluation and saving."""
    tokens_per_second: float = 0.0
    model_flops_per_second: float = 0.0
    """Model FLOP/s of one process."""
    parameters: int = 0
    """Parameters on this rank."""
    stopped: str | None = None
    """Why the run ended before its last step; None: it did not."""
    log_dir: str | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Facts added by hooks."""

    @property
    def applied(self) -> int:
        """Steps whose update was applied."""
        return self.iterations - self.skipped

    @property
    def eval_loss(self) -> float | None:
        """The last held-out loss."""
        return self.eval_losses[-1][1] if self.eval_losses else None

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "eval_losses": [list(pair) for pair in self.eval_losses]}

    def _nothing(self) -> str:
        idle = self.iterations and not self.applied
        return f": 0 of {self.iterations} steps were applied" if idle else ""

    def _last(self) -> str:
        return "the last step" if self.averaged == 1 else f"the last {self.averaged} steps"

    def rows(self) -> list[tuple[str, str]]:
        """Label and text, for the closing table."""

        def shown(loss: float | None) -> str:
            return "-" if loss is None else f"{loss:.4f}"

        speed = f"{self.tokens_per_second:,.0f} tokens/s, {self.model_flops_per_second / 1e9:,.1f} GFLOP/s of model arithmetic per process"
        ends = ", ".join(f"{loss:.4f} at step {step}" for step, loss in self.eval_losses[-3:])
        return [
            ("recipe", self.recipe),
            ("steps", f"{self.iterations} ({self.skipped} skipped, {self.nonfinite} not finite){self._nothing()}"),
            ("training loss", f"{shown(self.first_loss)} at first, {shown(self.last_loss)} over {self._last()}"),
            *([("held-out loss", ends)] if ends else []),
            ("samples", f"{self.consumed_samples:,}"),
            ("parameters", f"{self.parameters:,} on this rank"),
            ("speed", f"{speed}, {self.seconds:.1f} s in steps"),
            *([("stopped", self.stopped)] if self.stopped else []),
            *((str(name).replace("_", " "), str(value)) for name, value in self.notes.items()),
            *([("files", self.log_dir)] if self.log_dir else []),
        ]


def write_summary(summary: Summary, folder: Path | None) -> None:
    """Writes `folder`/summary.json; does nothing if folder is None. A write error is only reported on stderr, since the run is over and its summary printed."""
    if folder is not None:
        _write(folder / "summary.json", summary.as_data())


def _write(path: Path, data: Any) -> None:
    text = json.dumps(data, indent=2, default=str) + "\n"
    try:
        write(path, text)
    except (OSError, CheckpointError) as error:
        warn(f"{path} cannot be written ({why(error)}) and is incomplete")


def write_timing(run: Any, meter: Any, folder: Path | None) -> None:
    """Writes `folder`/timing.json, which `mpbridge estimate --against` and `recommend --runs` read; does nothing without a folder or a step."""
    if folder is None or not meter.steps:
        return
    times = sorted(took for took, _ in meter._times)
    data = {
        "recipe": run.recipe,
        "seconds": times[len(times) // 2],
        "tokens_per_second": meter.rate / meter.processes,
        "steps": len(times),
        "world_size": meter.processes,
        "config": settings_of(run),
    }
    _write(folder / "timing.json", data)
