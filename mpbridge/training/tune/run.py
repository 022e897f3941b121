"""Tuning the model of a configuration: on megatron-core, on this machine, from a checkpoint's weights or from scratch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpbridge.common.probe import installed
from mpbridge.common.tables.units import processes
from mpbridge.precision.config import MixedPrecisionConfig, plain_states
from mpbridge.settings.training import microbatches
from mpbridge.training.checkpoint import store
from mpbridge.training.data.batches import Feed
from mpbridge.training.process import bare, data_parallel, process_group, with_weights
from mpbridge.training.tune.levels import Budget, Pricing, Where, aimed, expressible, prepared
from mpbridge.training.tune.proof import EngineSubject
from mpbridge.training.tune.report import evidence
from mpbridge.training.tune.tuning import Tuned, TuningRequest, refuse_bad, tuned

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
        world = dist.get_world_size()
        run = container.resolved(world, training=False)
        config = run.stages[0].config
        base, policy = prepared(config)
        found, left_out = aimed(config, levels, where)
        target = where.priced(policy)
        priced = container.resolved(world, machine=target, versions=where.versions, training=False).facts
        found, notes = expressible(
            found, base, run=priced if where.machine else None, stack=where.stack, asked=levels is not None
        )
        asked = TuningRequest(
            config=config,
            levels=found,
            budget=budget or Budget(),
            batches=batches,
            unseen=unseen,
            pricing=Pricing(machine=target, constants=where.constants),
            run=dataclasses.replace(priced, machine=target),
            seed=int(run.train.get("seed") or 1234),
            notes=(*left_out, *notes),
        )
        with opened(container, base, batches=batches, unseen=unseen) as (subject, weights):
            result = tuned(subject, asked, say)
        library = f"megatron-core {installed().megatron_core}"
        return result, evidence(result, recipe=run.recipe, facts=_facts(run, weights, where), library=library)


@contextmanager
def opened(
    container: ConfigContainer, config: MixedPrecisionConfig, *, batches: int, unseen: int
) -> Iterator[tuple[EngineSubject, Path | None]]:
    """(the container's model under `config`, emulated; the checkpoint of its weights). Requires a process group."""
    given = dict(container.checkpoint).get("load")
    weights = store.locate(Path(given)) if given else None
    made = bare(container)
    made.mixed_precision = config.derive(**plain_states())
    for name, value in {"train_iters": batches, "eval_interval": 1, "eval_iters": unseen, "audit": "warn"}.items():
        setattr(made.train, name, value)
    run = made.resolved(dist.get_world_size())
    with with_weights(run, weights, cuda=torch.cuda.is_available()) as engine:
        rank, ranks = data_parallel()
        subject = EngineSubject(engine, Feed(run), microbatches=microbatches(run.train, ranks), rank=rank, ranks=ranks)
        yield subject, weights


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
        "layout": processes(run.world_size),
        "seed": run.train.get("seed"),
    }
