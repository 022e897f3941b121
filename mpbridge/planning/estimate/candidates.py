"""The layouts that a search considers: parallel sizes that divide, and micro-batch sizes and recomputation for each; and a layout as settings to paste after a command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mpbridge.common.errors import MpbridgeError
from mpbridge.common.facts import Parallel, RunFacts
from mpbridge.common.machines import Machine
from mpbridge.planning.estimate.build import divisible
from mpbridge.planning.memory.identical_layers import layer_kinds
from mpbridge.planning.memory.layers import rank_weights, unsplit
from mpbridge.precision.policy import PrecisionPolicy

_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
NONE: Mapping[str, Any] = MappingProxyType(dict.fromkeys(_RECOMPUTE))
FULL: Mapping[str, Any] = MappingProxyType(
    {**NONE, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
)
MICRO_BATCHES = (1, 2, 4, 8)
EXPERTS_PER_GPU = 32
"""Published runs hold at most that many."""


def recomputation(run: RunFacts) -> str:
    """The run's settings of `NONE`, as a key."""
    return repr([run.model.get(name) for name in NONE])


def families(
    policy: PrecisionPolicy, run: RunFacts, machine: Machine, *, stated: bool = False
) -> Iterator[tuple[RunFacts, ...]]:
    """Layouts of that world size whose sizes divide and whose states may fit; those of one family differ only in micro-batch size and recomputation.

    stated: the author set whether the optimizer is distributed; otherwise both are considered if the run's is not."""
    for group in groups(run, machine, stated=stated):
        for outline in group:
            if family := members(policy, run, machine, outline):
                yield family


class Outline(NamedTuple):
    """What the members of a family share."""

    sizes: Parallel
    placed: Mapping[str, Any]
    """Settings that place layers on stages."""
    distributed: bool
    """The optimizer."""


def groups(run: RunFacts, machine: Machine, *, stated: bool) -> Iterator[tuple[Outline, ...]]:
    """Every family of `families`, before batches and memory are looked at; those together that differ in virtual stages and the optimizer alone."""
    world = run.parallel.world_size
    sharded = "params" in run.traits.shards
    most = (1, 1, 1) if sharded else (min(8, machine.domain), 64, max(1, run.shape.seq_length // 4096))
    for tensor, pipeline, context in itertools.product(*map(_powers, most)):
        if world % (tensor * pipeline * context):
            continue
        alone = Parallel(
            world_size=world, tensor=tensor, pipeline=pipeline, context=context, sequence=tensor > 1,
            expert_tensor=1 if run.shape.experts else None,
        )  # fmt: skip
        for expert in _experts(run, world // pipeline):
            sizes = dataclasses.replace(alone, expert=expert)
            yield tuple(
                Outline(dataclasses.replace(sizes, virtual_pipeline=virtual), placed, distributed)
                for virtual, placed in _virtual(run, pipeline)
                for distributed in _distributed(run, sizes, stated=stated)
            )


def _distributed(run: RunFacts, sizes: Parallel, *, stated: bool) -> tuple[bool, ...]:
    """The values of `distributed` for the optimizer that are worth considering."""
    here = run.optimizer.distributed
    if here or stated or run.traits.distributed_optimizer != "optional":
        return (here,)
    return (True, False) if sizes.data * sizes.context > 1 else (False,)


def largest(run: RunFacts, outline: Outline) -> RunFacts | None:
    """The run with an outline's parallel sizes, the largest micro-batch that divides its batch, and no recomputation; None if none does."""
    each, left = divmod(run.global_batch_size, outline.sizes.data)
    micro = max((size for size in MICRO_BATCHES if each and not left and each % size == 0), default=None)
    if micro is None:
        return None
    model = {**unsplit(run, outline.sizes).model, **NONE}
    return dataclasses.replace(run, parallel=outline.sizes, model=model, micro_batch_size=micro)


def members(policy: PrecisionPolicy, run: RunFacts, machine: Machine, outline: Outline) -> tuple[RunFacts, ...]:
    """A family's layouts; none if batches or layers cannot be divided so, or states exceed the memory."""
    sizes = outline.sizes
    each, left = divmod(run.global_batch_size, sizes.data)
    model = {**unsplit(run, sizes).model, **NONE, **outline.placed}
    optimizer = dataclasses.replace(run.optimizer, distributed=outline.distributed)
    base = dataclasses.replace(run, parallel=sizes, model=model, optimizer=optimizer, micro_batch_size=1)
    # 0: unknown
    if left or (machine.memory_bytes and _states_at_least(policy, base) > machine.memory_bytes):
        return ()
    try:
        divisible(base)
    except MpbridgeError:
        return ()
    turns = sizes.pipeline if (sizes.virtual_pipeline or 1) > 1 else 1
    least = sizes.pipeline  # micro-batches, so that no stage idles
    micros = [size for size in MICRO_BATCHES if each % size == 0 and each // size % turns == 0]
    micros = [size for size in micros if least == 1 or each // size >= least]
    own = {name: run.model.get(name) for name in NONE}
    choices = [NONE, *([own] if own["recompute_granularity"] == "selective" else []), FULL]
    return tuple(
        dataclasses.replace(base, micro_batch_size=micro, model={**model, **choice})
        for micro in micros
        for choice in choices
    )


def _states_at_least(policy: PrecisionPolicy, run: RunFacts) -> float:
    """Bytes of parameters and gradients of an average stage: a lower bound on what the fullest GPU holds."""
    # what is frozen has no gradient
    each = policy.params.bytes / (2 if policy.stored else 1) + (0 if policy.frozen else policy.reduce.bytes)
    if "params" in run.traits.shards:
        each /= run.parallel.data
    # layers of one kind have the same weights
    kinds = Counter(layer_kinds(policy, run)).items()
    weights = sum(many * sum(one.elements for one in rank_weights(run, layer)) for layer, many in kinds)
    return weights / run.parallel.pipeline * each


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def _experts(run: RunFacts, ranks: int) -> list[int]:
    """Expert-parallel sizes: the four smallest that leave at most 32 experts per GPU; otherwise the largest that divides."""
    if not run.shape.experts:
        return [1]
    experts = run.shape.experts
    found = [size for size in _powers(min(experts, ranks)) if experts % size == 0 and ranks % size == 0]
    return [size for size in found if experts // size <= EXPERTS_PER_GPU][:4] or found[-1:]


def virtuals(run: RunFacts) -> Iterator[RunFacts]:
    """The run with every other number of virtual stages that divides the layers, fewest first."""
    for count, placed in _virtual(run, run.parallel.pipeline):
        if count != run.parallel.virtual_pipeline:
            sizes = dataclasses.replace(run.parallel, virtual_pipeline=count)
            model = {**unsplit(run, sizes).model, **{name: run.model.get(name) for name in NONE}, **placed}
            yield dataclasses.replace(run, parallel=sizes, model=model)


def _virtual(run: RunFacts, pipeline: int) -> list[tuple[int | None, Mapping[str, Any]]]:
    """(virtual stages, settings that place layers on them): every number that divides the layers evenly, else powers of two up to 8."""
    if pipeline == 1:
        return [(None, {})]
    layers, ahead = run.shape.num_layers, run.shape.mtp_layers
    found: list[tuple[int | None, Mapping[str, Any]]] = []
    for count in range(1, layers // pipeline + 2):
        placed = placement(layers, ahead, pipeline * count)
        if placed is not None and (count in (1, 2, 4, 8) or "pipeline_model_parallel_layout" not in placed):
            found.append((count if count > 1 else None, placed))
    return found


def placement(layers: int, ahead: int, chunks: int) -> Mapping[str, Any] | None:
    """Settings that spread layers over that many chunks: evenly; with the embedding and the loss counting as layers; otherwise by a layout in which the
    last chunk, then the first, gets fewer layers. ahead: layers of multi-token prediction. None: there are too few layers."""
    if layers % chunks == 0:
        return {}
    if (layers + 2) % chunks == 0 and not ahead:
        return {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    each = -(-layers // chunks)
    missing = each * chunks - layers
    last = each - min(missing, each)
    first = each - (missing - (each - last))
    if first < 0:
        return None
    middle = f"({'t' * each}|)*{chunks - 2}" if chunks > 2 else ""
    return {"pipeline_model_parallel_layout": f"E{'t' * first}|{middle}{'t' * last}{'m' * ahead}L"}


def moved(run: RunFacts, here: RunFacts, there: RunFacts) -> RunFacts:
    """`run` in the layout of `there`: with all that distinguishes it from `here`, which is in `run`'s layout but in another recipe."""
    gone = here.model.keys() - there.model.keys()
    changed = {
        name: value for name, value in there.model.items() if name not in here.model or here.model[name] != value
    }
    model = {name: value for name, value in run.model.items() if name not in gone} | changed
    distributed = there.optimizer.distributed
    return dataclasses.replace(
        run, parallel=there.parallel, model=model, micro_batch_size=there.micro_batch_size, global_batch_size=there.global_batch_size,
        optimizer=run.optimizer if distributed == here.optimizer.distributed else dataclasses.replace(run.optimizer, distributed=distributed),
    )  # fmt: skip


PLACES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout")


def line(run: RunFacts, than: RunFacts | None = None, *, left: Collection[str] = ()) -> str:
    """The run's layout as settings to paste after a command; than: only those in which it differs from this run. left: the batch sizes that its author left to what
    follows from the layout, which another layout needs to name."""
    known = set(_settings(than)) if than is not None else set()
    if "micro_batch_size" in left and run.micro_batch_size * run.parallel.data != run.global_batch_size:
        known.discard(f"train.micro_batch_size={run.micro_batch_size}")
    made = [setting for setting in _settings(run) if setting not in known]
    if ("global_batch_size" in left and made) or (than is not None and run.global_batch_size != than.global_batch_size):
        made.append(f"train.global_batch_size={run.global_batch_size}")
    return " ".join(made)


def _settings(run: RunFacts) -> list[str]:
    sizes, parts = run.parallel, []
    for name, value in (
        ("tensor_model", sizes.tensor), ("pipeline_model", sizes.pipeline), ("virtual_pipeline_model", sizes.virtual_pipeline or "null"),
        ("context", sizes.context), ("expert_model", sizes.expert),
    ):  # fmt: skip
        parts.append(f"parallel.{name}_parallel_size={value}")
    if run.shape.experts:
        parts.append(f"parallel.expert_tensor_parallel_size={sizes.expert_tensor or 'null'}")
    parts.append(f"parallel.sequence_parallel={str(sizes.sequence).lower()}")
    parts.append(f"train.micro_batch_size={run.micro_batch_size}")
    parts += [_setting(name, run.model.get(name) or None) for name in PLACES]
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        parts.append(f"model.{name}={str(bool(run.model.get(name))).lower()}")
    parts += [_setting(name, run.model.get(name)) for name in NONE]
    parts.append(f"ddp.use_distributed_optimizer={str(run.optimizer.distributed).lower()}")
    return parts


def _setting(name: str, value: object) -> str:
    """A model setting quoted for a shell: a layout contains brackets and bars, a list of modules contains quotes."""
    text = json.dumps(list(value), separators=(",", ":")) if isinstance(value, (list, tuple)) else value
    return shlex.quote(f"model.{name}={'null' if text is None else text}")
