"""Tuning the model of a configuration: on megatron-core, on this machine, from a checkpoint's weights or from scratch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpbridge.backend.devices import device_layer
from mpbridge.backend.engines.optimizers import CpuFusedAdam
from mpbridge.backend.engines.registry import build_engine
from mpbridge.common.probe import installed
from mpbridge.common.traits import DEFAULT
from mpbridge.precision.config import MixedPrecisionConfig, plain_states
from mpbridge.settings.training import microbatches
from mpbridge.training.base import Training
from mpbridge.training.checkpoint import store
from mpbridge.training.checkpoint.io import load
from mpbridge.training.data.batches import Feed
from mpbridge.training.machine import data_parallel, process_group, process_settings
from mpbridge.training.metrics import Counters
from mpbridge.training.tune.costs import Budget, Pricing
from mpbridge.training.tune.expressible import Where, default_levels, expressible, natural, runnable
from mpbridge.training.tune.report import evidence
from mpbridge.training.tune.subject import EngineSubject
from mpbridge.training.tune.tuning import Tuned, TuningRequest, levels_of, prepared, refuse_bad, tuned

if TYPE_CHECKING:
    from mpbridge.settings.container import ConfigContainer, Run


def tune(
    container: ConfigContainer,
    *,
    levels: Sequence[str] | None = None,
    budget: Budget | None = None,
    batches: int = 8,
    unseen: int = 4,
    where: Where | None = None,
    say: Callable[[str], None] = print,
) -> tuple[Tuned, dict[str, Any]]:
    """Which linears of `container`'s model can run in low precision under its recipe: the result, and its record for a recipe file.

    The weights come from checkpoint.load. batches: global batches to score; unseen: global batches of the validation split for the proof. Nothing is
    trained and nothing of the run is written. Raises Refused for a recipe or level that cannot be tuned, BadValue for invalid budgets and numbers,
    CheckpointError, DataError. Every rank calls it.
    """
    refuse_bad(batches, unseen)
    where = where or Where()
    with process_group(torch.cuda.is_available()):
        run = container.resolved(dist.get_world_size(), training=False)
        asked = dataclasses.replace(
            _request(container, run, levels, where), budget=budget or Budget(), batches=batches, unseen=unseen
        )
        base, _ = prepared(asked.config)
        with opened(container, base, batches=batches, unseen=unseen) as (subject, weights):
            result = tuned(subject, asked, say)
        library = f"megatron-core {installed().megatron_core}"
        return result, evidence(result, recipe=run.recipe, facts=_facts(run, weights, where), library=library)


def _request(container: ConfigContainer, run: Run, levels: Sequence[str] | None, where: Where) -> TuningRequest:
    """The request for `run`: the levels that its target can run and its stack can express, priced there. Raises Refused."""
    config = run.stages[0].config
    base, policy = prepared(config)
    words = default_levels(config) if levels is None else levels
    target = where.machine or natural(policy.quants)
    found, left_out = runnable(
        levels_of(words, config), base, machine=where.machine, versions=where.versions, asked=levels is not None
    )
    priced = container.resolved(dist.get_world_size(), machine=target, versions=where.versions, training=False)
    found, notes = expressible(
        found, base, run=priced.facts if where.machine else None, stack=where.stack, asked=levels is not None
    )
    return TuningRequest(
        config=config,
        levels=found,
        pricing=Pricing(machine=target, constants=where.constants),
        run=dataclasses.replace(priced.facts, machine=target),
        seed=int(run.train.get("seed") or 1234),
        notes=(*left_out, *notes),
    )


@contextmanager
def opened(
    container: ConfigContainer, config: MixedPrecisionConfig, *, batches: int, unseen: int
) -> Iterator[tuple[EngineSubject, Path | None]]:
    """(the container's model under `config`, emulated; the checkpoint of its weights). Requires a process group."""
    given = dict(container.checkpoint).get("load")
    weights = store.locate(Path(given)) if given else None
    run = measuring(container, config, batches=batches, unseen=unseen)
    with ExitStack() as stack:
        stack.enter_context(process_settings(run.train))
        stack.enter_context(device_layer(torch.cuda.is_available(), fused_adam=CpuFusedAdam))
        engine = build_engine(run)
        stack.callback(engine.close)
        feed = Feed(run)
        if weights is not None:
            load(
                Training(run=run, engine=engine, scheduler=None, feed=feed, counters=Counters()),
                weights,
                weights_alone=True,
            )
        rank, ranks = data_parallel()
        yield EngineSubject(engine, feed, microbatches=microbatches(run.train, ranks), rank=rank, ranks=ranks), weights


def measuring(container: ConfigContainer, config: MixedPrecisionConfig, *, batches: int, unseen: int) -> Run:
    """The run on which gradients are measured: `config`'s linears, emulated, on an engine that does not shard gradients."""
    made = container.copy()
    made.mixed_precision, made.emulate, made.engine = config.derive(**plain_states()), True, DEFAULT
    for section in (made.ddp, made.optimizer):
        for name in ("use_distributed_optimizer", "overlap_param_gather"):
            if section.get(name):
                section[name] = False
    made.train.train_iters, made.train.eval_interval, made.train.eval_iters, made.train.audit = (
        batches,
        1,
        unseen,
        "warn",
    )
    made.checkpoint, made.logger = {}, {"log_dir": None, "tensorboard": False, "progress": False}
    return made.resolved(dist.get_world_size())


def _facts(run: Run, weights: Path | None, where: Where) -> dict[str, Any]:
    shape = run.facts.shape
    target = [name for name in (where.stack, where.machine.name if where.machine else None) if name]
    return {
        **({"for": " on ".join(target)} if target else {}),
        "model": f"{shape.num_layers} layers of width {shape.hidden_size}"
        + (f", {shape.experts} experts" if shape.experts else ""),
        "checkpoint": str(weights) if weights is not None else "none: randomly initialized weights",
        "data": run.data["corpus"] if isinstance(run.data["corpus"], str) else list(map(str, run.data["corpus"])),
        "batch": f"{run.train['global_batch_size']} sequences of {shape.seq_length} tokens",
        "layout": f"{run.world_size} process{'es' if run.world_size > 1 else ''}",
        "seed": run.train.get("seed"),
    }
