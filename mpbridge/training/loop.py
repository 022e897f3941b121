"""`pretrain(run)`: trains a resolved run and returns its summary. Deliberately thin: everything except the step is a hook."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mpbridge.backend.devices import device_layer
from mpbridge.backend.devices.collectives import on_first_rank
from mpbridge.backend.engines.contract import Batch
from mpbridge.backend.engines.optimizers import CpuFusedAdam
from mpbridge.backend.engines.registry import build_engine
from mpbridge.common.errors import CheckpointError
from mpbridge.common.files import why, write
from mpbridge.common.report.console import console, rank, tell, warn
from mpbridge.common.report.metrics import MetricsLog
from mpbridge.common.report.progress import ProgressLine
from mpbridge.common.tables import table
from mpbridge.observe.audit import AuditHook
from mpbridge.observe.audit.replicas import agree
from mpbridge.observe.telemetry.hook import StatisticsHook
from mpbridge.planning.estimate.gemms import whole_square_flops_per_token
from mpbridge.settings.container import Run
from mpbridge.settings.training import microbatches, train_iters
from mpbridge.te_cpu.context import stage_of
from mpbridge.training.admission import preflight, require_admission, settings_of, write_precision
from mpbridge.training.base import Counters, Hook, Hooks, Meter, Summary, Training, line, scheduler
from mpbridge.training.checkpoint import store
from mpbridge.training.checkpointer import Checkpointer, Nonfinite, Stages, anchored, at_stage, check_stages, switch
from mpbridge.training.data.batches import Feed
from mpbridge.training.process import Signals, data_parallel, explained, process_group, process_settings


def pretrain(
    run: Run,
    *,
    dataset: Iterable[Mapping[str, torch.Tensor]] | None = None,
    hooks: Iterable[Hook] = (),
    quiet: bool = False,
) -> Summary:
    """Trains `run` and returns its figures. Every rank of the job must call it.

    dataset: an iterable of samples instead of data.corpus (`data.batches.Feed`); its length is never used.
    hooks: called after those that the run's sections require. quiet: print nothing.
    Raises Refused before anything is built if the machine or a rule forbids the run, BadValue and Contradiction for settings that do not
    fit, DataError for data that cannot be used.
    """
    train_iters(run.train)
    with stage_of(run):
        return _pretrain(run, dataset, hooks, quiet)


def _pretrain(
    run: Run, dataset: Iterable[Mapping[str, torch.Tensor]] | None, hooks: Iterable[Hook], quiet: bool
) -> Summary:
    out = console(speaks=rank() == 0 and not quiet)
    run = at_stage(anchored(run))
    for message in check_stages(run, said=preflight(run, out)):
        tell(out, message)
    parts = Hooks([*default_hooks(run, partial(tell, out)), *hooks])
    cuda = torch.cuda.is_available()
    with ExitStack() as claims, ExitStack() as stack:  # the folders stay this run's until its hooks are closed
        stack.callback(parts.closed)
        stack.enter_context(process_settings(run.train))
        stack.enter_context(device_layer(cuda, fused_adam=CpuFusedAdam))
        stack.enter_context(process_group(cuda, minutes=float(run.train.get("timeout_minutes") or 60.0)))
        stack.enter_context(explained())
        for message in on_first_rank(lambda: require_admission(run, own_data=dataset is not None)):
            tell(out, message)
        on_first_rank(partial(_claim, run, claims))  # before hours of packing
        agree(run.policy)  # at the stage that this rank found in the checkpoint
        for stage in run.stages:
            agree(stage.policy)
        feed = Feed(run, dataset)
        for done in feed.corpus.prepared if feed.corpus is not None else ():
            tell(out, f"corpus: {done.line()}")
        if feed.corpus is not None and (ends := getattr(feed.corpus.tokenizer, "end_line", "")):
            tell(out, f"corpus: {ends}")
        training = Training(run=run, engine=build_engine(run), scheduler=None, feed=feed, counters=Counters())
        # the engine at the end: a schedule may have replaced the first
        stack.callback(lambda: training.engine.close())
        training.scheduler = scheduler(run, training.engine.optimizer)
        steps = _Steps(training, parts)
        summary = steps.go(stack, out)
        # before the handlers are restored, since a notice may be repeated while this is written
        write_summary(summary, steps.folder)
        write_timing(run, steps.meter, steps.folder)
        out.print(table("summary", ("", ""), summary.rows()))
    return summary


def _claim(run: Run, claims: ExitStack) -> None:
    """Keeps other runs from writing among this one's lines and checkpoints. Raises CheckpointError naming the run that does."""
    if folder := run.logger.get("log_dir"):
        claims.enter_context(store.claim(Path(folder), setting="logger.log_dir", name=store.LOGGER))
    if folder := run.checkpoint.get("save"):
        claims.enter_context(store.claim(Path(folder)))
        store.put_back(Path(folder))


def default_hooks(run: Run, show: Callable[[Any], None]) -> list[Hook]:
    """The hooks that a run's sections require, in order of execution. show: prints a table or a line."""
    audit: Any = AuditHook(
        mode=run.train["audit"],
        folder=run.logger["log_dir"],
        show=show,
        every=run.audit["every"],
        invariants=int(run.train.get("log_interval") or 10),
    )
    notes: list[Hook] = [EmulationNotes(show)] if run.emulate else []
    checkpointer = Checkpointer(run)
    nonfinite = Nonfinite(str(run.train.get("nonfinite") or "skip"), checkpointer)
    statistics: Any = StatisticsHook(run.logger["log_dir"], every=run.logger.get("precision_every"))
    # statistics first, so that their hooks are removed before the audit inspects modules; then the audit, so that what it stops is not saved
    return [statistics, audit, *notes, Signals(), nonfinite, checkpointer, Stages(run)]


class EmulationNotes(Hook):
    """Shows the emulation's notes when an engine is built, and keeps them for the summary. show: prints a line."""

    def __init__(self, show: Callable[[Any], None]) -> None:
        self.show = show

    def built(self, training: Training) -> None:
        """Shows and keeps the notes of an emulated engine."""
        emulation = getattr(training.engine, "emulation", None)
        if emulation is None:
            return
        first, *others = emulation.notes()
        training.notes["emulation"] = first
        self.show("\n".join([first, "not as on the GPU:", *(f"  - {note}" for note in others)]))


class _Steps:
    def __init__(self, training: Training, hooks: Hooks) -> None:
        run = training.run
        self.training, self.hooks, self.engine = training, hooks, training.engine
        self.total = train_iters(run.train)
        self.global_batch = int(run.train["global_batch_size"])
        self.rank, self.ranks = data_parallel()
        self.microbatches = microbatches(run.train, self.ranks)
        self.tokens = self.global_batch * training.feed.seq_length
        self.meter = Meter(flops=whole_square_flops_per_token(run.facts.shape), processes=dist.get_world_size())
        self.eval_losses: list[tuple[int, float]] = []
        self.eval_interval = int(run.train.get("eval_interval") or 0)
        self.eval_iters = int(run.train.get("eval_iters") or 0)
        self.folder = Path(run.logger["log_dir"]) if run.logger.get("log_dir") and rank() == 0 else None

    def go(self, stack: ExitStack, out: Any) -> Summary:
        """Runs all remaining steps and returns the figures."""
        training, run, counters = self.training, self.training.run, self.training.counters
        interval = int(run.train.get("log_interval") or 10)
        write_precision(run, self.folder)
        self.hooks.built(training)
        log = MetricsLog(self.folder, logger=run.logger, recipe=run.recipe, after=counters.iteration)
        log.trouble = training.in_trouble
        stack.callback(log.close)
        bar = bool(run.logger.get("progress", True))
        training.progress = stack.enter_context(
            ProgressLine(out, total=self.total, done=counters.iteration, interval=interval, bar=bar)
        )
        stream, training.moved = training.feed.batches("train", counters.consumed, self.rank, self.ranks), False
        if self.eval_iters and self.eval_interval:
            # opened now, so that a corpus too small for a held-out part is refused before the first step
            training.feed.batches("valid", 0, self.rank, self.ranks)
        self.hooks.started(training)
        while counters.iteration < self.total and training.stop is None:
            if training.next_run is not None:
                switch(training)
                self._show_engine()
            if training.moved:
                stream, training.moved = training.feed.batches("train", counters.consumed, self.rank, self.ranks), False
            self._step(stream, log, interval)
        self.hooks.finished(training)
        if training.failure is not None:
            raise training.failure
        return self._summary()

    def _step(self, stream: Iterator[Batch], log: MetricsLog, interval: int) -> None:
        training, counters, meter = self.training, self.training.counters, self.meter
        self.hooks.stepping(training)
        meter.begin()
        result = training.engine.train_step(stream, microbatches=self.microbatches)
        if result.applied:
            training.scheduler.step(self.global_batch)
        meter.end(result, self.tokens)
        counters.count(result, samples=self.global_batch, tokens=self.tokens)
        at = counters.iteration
        if self.folder is not None:
            log.write(meter.row(counters, result), board=at % interval == 0 or at in (1, self.total))
        if training.progress is not None and training.progress.due(at):
            training.progress.step(at, line(result, meter, counters))
        self.hooks.stepped(training, result)
        self._show_engine()
        log.track({"iteration": at, **training.measured})
        training.measured = {}
        if (every := training.run.train.get("exit_interval")) and at % int(every) == 0 and at < self.total:
            training.stop = training.stop or f"train.exit_interval={every} at step {at}"
        # always measure after the last step, so that the summary describes the final weights
        if self.eval_iters and self.eval_interval and (at % self.eval_interval == 0 or at == self.total):
            self._evaluate(log)

    def _show_engine(self) -> None:
        """Hooks see the engine that a switch, or a rollback past one, has built in the place of theirs."""
        if self.engine is not self.training.engine:
            self.engine = self.training.engine
            self.hooks.built(self.training)
            self.hooks.started(self.training)

    def _evaluate(self, log: MetricsLog) -> None:
        """The held-out loss on the same samples every time: a curve of the model, not sampling noise."""
        training, at = self.training, self.training.counters.iteration
        stream = training.feed.batches("valid", 0, self.rank, self.ranks)
        self.hooks.evaluating(training)
        loss = training.engine.evaluate(stream, microbatches=self.eval_iters * self.microbatches)
        self.eval_losses.append((at, loss))
        log.write({"iteration": at, "eval_loss": loss})
        training.say(f"step {at}: held-out loss {loss:.4f}")
        self.hooks.evaluated(training, loss)

    def _summary(self) -> Summary:
        training, counters, meter = self.training, self.training.counters, self.meter
        log_dir = training.run.logger.get("log_dir")
        return Summary(
            recipe=training.run.recipe,
            iterations=counters.iteration,
            skipped=counters.skipped,
            nonfinite=counters.nonfinite,
            consumed_samples=counters.consumed,
            first_loss=meter.first_loss,
            last_loss=meter.recent_loss,
            averaged=len(meter.losses),
            eval_losses=tuple(self.eval_losses),
            seconds=meter.seconds,
            tokens_per_second=meter.mean_rate,
            model_flops_per_second=meter.flops_rate(meter.mean_rate),
            parameters=sum(tensor.numel() for _, tensor in training.engine.named_parameters()),
            stopped=training.stop,
            log_dir=os.fspath(log_dir) if log_dir else None,
            notes=training.notes,
        )


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
        "recipe": run.recipe, "seconds": times[len(times) // 2], "tokens_per_second": meter.rate / meter.processes,
        "steps": len(times), "world_size": meter.processes, "config": settings_of(run),
    }  # fmt: skip
    _write(folder / "timing.json", data)
