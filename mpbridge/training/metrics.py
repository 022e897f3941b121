"""Counters and rates of a run: numbers collected from steps, written by report/metrics.py."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpbridge.backend.engines.contract import StepResult

RECENT = 10
"""Number of steps in the mean of recent losses."""


@dataclass(slots=True)
class Counters:
    """A run's progress; plain numbers stored in checkpoints."""

    iteration: int = 0
    """Finished steps, including skipped ones."""
    consumed: int = 0
    """Training samples read by the whole job."""
    skipped: int = 0
    """Steps whose update was not applied."""
    nonfinite: int = 0
    """Steps whose loss or gradient was NaN or infinite, except overflows that a loss scale handles."""
    tokens: int = 0
    """Training tokens read by the whole job."""

    def count(self, result: StepResult, *, samples: int, tokens: int) -> None:
        """Adds one step."""
        self.iteration += 1
        self.consumed += samples
        self.tokens += tokens
        self.skipped += not result.applied
        # without a loss scale, the only reason to skip is a gradient that is not finite
        gradient = math.isfinite(result.grad_norm or 0.0) and (result.applied or result.loss_scale != 1.0)
        self.nonfinite += not (math.isfinite(result.loss) and gradient)


@dataclass(slots=True)
class Meter:
    """Rates of this process's part of the run. Time outside of steps (evaluation, checkpoints) does not count.

    flops: model FLOPs per token; processes: number of devices sharing the work, for the rate per device.
    """

    flops: int
    processes: int
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    first_loss: float | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT))
    _began: float = 0.0

    def begin(self) -> None:
        """Marks the beginning of a step."""
        self._began = time.perf_counter()

    def end(self, result: StepResult, tokens: int) -> None:
        """Marks the end of a step in which the whole job read `tokens`."""
        took = time.perf_counter() - self._began
        self.seconds += took
        self.tokens += tokens
        self.steps += 1
        self._times.append((took, tokens))
        self.losses.append(result.loss)
        if self.first_loss is None:
            self.first_loss = result.loss

    @property
    def rate(self) -> float:
        """Tokens per second of the whole job, over the last few steps."""
        took = sum(seconds for seconds, _ in self._times)
        return sum(tokens for _, tokens in self._times) / took if took else 0.0

    @property
    def mean_rate(self) -> float:
        """Tokens per second of the whole job, over all steps of this process."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def flops_rate(self, tokens_a_second: float) -> float:
        """Model FLOP/s of one process at that rate."""
        return tokens_a_second * self.flops / self.processes

    @property
    def recent_loss(self) -> float | None:
        """Mean loss over the last few steps, ignoring non-finite ones."""
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        return sum(finite) / len(finite) if finite else None

    def row(self, counters: Counters, result: StepResult) -> dict[str, Any]:
        """One line of the metrics file."""
        took, tokens = self._times[-1]
        return {
            "iteration": counters.iteration,
            "consumed_samples": counters.consumed,
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "loss_scale": result.loss_scale,
            "applied": result.applied,
            "skipped_steps": counters.skipped,
            "nonfinite_steps": counters.nonfinite,
            "step_seconds": round(took, 6),
            "tokens_per_second": round(tokens / took, 2),
            "model_flops_per_second": round(self.flops_rate(tokens / took)),
        }


def line(result: StepResult, meter: Meter, counters: Counters) -> str:
    """A step's text in the progress line."""
    norm = "-" if result.grad_norm is None else f"{result.grad_norm:.3f}"
    scale = f"{result.loss_scale:g}" if result.loss_scale < 65536 else f"2**{math.log2(result.loss_scale):g}"
    skipped = f"  skipped {counters.skipped}" if counters.skipped else ""
    return f"loss {result.loss:.4f}  grad norm {norm}  loss scale {scale}  lr {result.lr:.2e}  {meter.rate:,.0f} tokens/s{skipped}"
