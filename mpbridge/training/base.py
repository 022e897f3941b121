"""A run between two steps: its counters and rates, the summary that it ends with, and hooks, by which other code takes part: a Hook is called on events and may act on the Training
that it receives."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpbridge.backend.devices.collectives import rank
from mpbridge.backend.engines.contract import Engine, StepResult
from mpbridge.common.errors import MpbridgeError
from mpbridge.common.report.progress import ProgressLine
from mpbridge.settings.container import Run
from mpbridge.settings.training import scheduler_arguments
from mpbridge.training.checkpoint import store
from mpbridge.training.data.batches import Feed

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
            "iteration": counters.iteration, "consumed_samples": counters.consumed, "loss": result.loss,
            "lr": result.lr, "grad_norm": result.grad_norm, "loss_scale": result.loss_scale, "applied": result.applied,
            "skipped_steps": counters.skipped, "nonfinite_steps": counters.nonfinite, "step_seconds": round(took, 6),
            "tokens_per_second": round(tokens / took, 2),
            "model_flops_per_second": round(self.flops_rate(tokens / took)),
        }  # fmt: skip


def line(result: StepResult, meter: Meter, counters: Counters) -> str:
    """A step's text in the progress line."""
    norm = "-" if result.grad_norm is None else f"{result.grad_norm:.3f}"
    scale = f"{result.loss_scale:g}" if result.loss_scale < 65536 else f"2**{math.log2(result.loss_scale):g}"
    skipped = f"  skipped {counters.skipped}" if counters.skipped else ""
    return f"loss {result.loss:.4f}  grad norm {norm}  loss scale {scale}  lr {result.lr:.2e}  {meter.rate:,.0f} tokens/s{skipped}"


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

    def rows(self) -> list[tuple[str, str]]:
        """Label and text, for the closing table."""

        def shown(loss: float | None) -> str:
            return "-" if loss is None else f"{loss:.4f}"

        speed = f"{self.tokens_per_second:,.0f} tokens/s, {self.model_flops_per_second / 1e9:,.1f} GFLOP/s of model arithmetic per process"
        ends = ", ".join(f"{loss:.4f} at step {step}" for step, loss in self.eval_losses[-3:])
        idle = f": 0 of {self.iterations} steps were applied" if self.iterations and not self.applied else ""
        last = "the last step" if self.averaged == 1 else f"the last {self.averaged} steps"
        return [
            ("recipe", self.recipe),
            ("steps", f"{self.iterations} ({self.skipped} skipped, {self.nonfinite} not finite){idle}"),
            ("training loss", f"{shown(self.first_loss)} at first, {shown(self.last_loss)} over {last}"),
            *([("held-out loss", ends)] if ends else []),
            ("samples", f"{self.consumed_samples:,}"),
            ("parameters", f"{self.parameters:,} on this rank"),
            ("speed", f"{speed}, {self.seconds:.1f} s in steps"),
            *([("stopped", self.stopped)] if self.stopped else []),
            *((str(name).replace("_", " "), str(value)) for name, value in self.notes.items()),
            *([("files", self.log_dir)] if self.log_dir else []),
        ]


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
    doubted: int | None = None
    """Since the last checkpoint was begun: the step after which what was called good is suspect."""
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
        self.doubted = after if self.doubted is None else min(after, self.doubted)
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
        """The engine is built and no step was done: load, or audit. Called again when a schedule or a rollback rebuilds the engine."""

    def started(self, training: Training) -> None:
        """The run is about to take its first step with this engine."""

    def stepping(self, training: Training) -> None:
        """A step is about to be taken."""

    def stepped(self, training: Training, result: StepResult) -> None:
        """A step is finished and counted; result.applied tells whether weights were updated. An engine that a rollback has just built is shown by `built` and `started` after this."""

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


def scheduler(run: Run, optimizer: Any) -> Any:
    """An OptimizerParamScheduler on `optimizer`; `step(global_batch_size)` follows every applied update."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    arguments = scheduler_arguments(run)
    for group in optimizer.param_groups:
        # OptimizerConfig's own defaults are None, with which the schedule would compute
        for name in ("max_lr", "min_lr"):
            if name in group and group[name] is None:
                group[name] = arguments[name]
    return OptimizerParamScheduler(optimizer, **arguments)
