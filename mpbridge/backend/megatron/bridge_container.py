"""Megatron Bridge's ConfigContainer: a recipe on its three configs, judged by the rules, with nothing left that Bridge would write over it."""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mpbridge.backend.megatron.targets import apply as apply_plan
from mpbridge.common.errors import BadValue, Refused
from mpbridge.common.facts import OptimizerFacts, RunFacts
from mpbridge.common.formats import plain
from mpbridge.common.traits import DEFAULT, traits
from mpbridge.planning.memory.keeps import updater
from mpbridge.planning.rules.base import Violation
from mpbridge.planning.rules.table import require_here
from mpbridge.precision.config import GLOBS, MixedPrecisionConfig
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.registry import get_mixed_precision_config, key
from mpbridge.precision.resolve import resolve
from mpbridge.precision.sync.plan import Plan, plan
from mpbridge.settings.draft import filled
from mpbridge.settings.schema import as_mapping
from mpbridge.settings.shape import live_parallel, model_shape

_RECEIPT = "_mpbridge_receipt"
"""Attribute of a container with the receipt of the last recipe: the next one replaces it."""
log = logging.getLogger("mpbridge")
AnyRecipe = str | Path | MixedPrecisionConfig | PrecisionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerPlan:
    """What a recipe writes onto Bridge's configs, and what Bridge itself does to precision afterwards."""

    plan: Plan
    bridge: tuple[str, ...]
    """What Bridge would override or drop, one line each."""
    warnings: tuple[Violation, ...]

    def __str__(self) -> str:
        told = [str(self.plan), *(f"Bridge  {line}" for line in self.bridge)]
        told += [
            f"warning  {one.rule}: {one.found}; expected {one.expected}. Cure: {one.cure}" for one in self.warnings
        ]
        return "\n".join(told)


def container_plan(container: Any, recipe: AnyRecipe) -> ContainerPlan:
    """The plan of `apply`, judged; changes nothing. Raises as `apply` does."""
    missing = [name for name in ("model", "optimizer", "ddp") if getattr(container, name, None) is None]
    if missing or not hasattr(container, "mixed_precision"):
        raise BadValue(
            f"{type(container).__name__} has no {', '.join(missing) or 'mixed_precision'}: expected Megatron Bridge's ConfigContainer, complete"
        )
    policy = recipe if isinstance(recipe, PrecisionPolicy) else resolve(get_mixed_precision_config(recipe))
    if left := [f"mixed_precision.{name}=null" for name in GLOBS if getattr(policy, name)]:
        what = "keep_fp32 and frozen need the built model, and Bridge builds it itself and does neither"
        raise Refused(f"{what}: {' '.join(left)}, or mpbridge's own engines")
    with _sharded_as_bridge_will(container):
        made = plan(
            policy, model=container.model, optimizer=container.optimizer, ddp=container.ddp, after=getattr(container, _RECEIPT, None)
        )  # fmt: skip
        _, warnings = require_here(policy, _facts(container, policy, made))
    return ContainerPlan(plan=made, bridge=tuple(_bridges(container, policy, recipe)), warnings=warnings)


def apply(container: Any, recipe: AnyRecipe, *, on_conflict: Literal["warn", "error"] = "warn") -> ContainerPlan:
    """Writes a recipe onto Megatron Bridge's ConfigContainer, all or nothing; call it before `pretrain` or `finetune`. A second call replaces the first.

    recipe: a registered name, a file, 'module:function', a config or a policy; also what Bridge's own fields cannot say. `mixed_precision` becomes
    None, because Bridge would write it over the recipe. on_conflict: as for mpbridge.apply.
    Raises Refused with every rule that this machine, megatron-core or Bridge's loop breaks, Conflict, UpstreamRefused, UnknownName, BadValue.
    """
    made = container_plan(container, recipe)
    with _sharded_as_bridge_will(container):
        receipt = apply_plan(made.plan, on_conflict=on_conflict)
    container.mixed_precision = None
    setattr(container, _RECEIPT, receipt)
    if os.environ.get("RANK", "0") == "0":
        for line in (*made.bridge, *(f"{one.rule}: {one.found}; cure: {one.cure}" for one in made.warnings)):
            log.warning("Megatron Bridge: %s", line)
    return made


@contextlib.contextmanager
def _sharded_as_bridge_will(container: Any) -> Iterator[None]:
    """dist.use_megatron_fsdp stands in ddp meanwhile: Bridge copies it there after this call (training/config.py validate), and fields of a recipe depend on it."""
    engine, said = _engine(container), getattr(container.ddp, "use_megatron_fsdp", False)
    if engine == DEFAULT or said:
        yield
        return
    container.ddp.use_megatron_fsdp = True
    try:
        yield
    finally:
        container.ddp.use_megatron_fsdp = said


def _engine(container: Any) -> str:
    """Our name of the engine that Bridge builds."""
    said = getattr(container, "dist", None)
    if getattr(said, "use_torch_fsdp2", False):
        raise BadValue(
            "dist.use_torch_fsdp2: megatron-core's wrapper of torch FSDP2 is not among the engines that mpbridge knows rules for"
        )
    fsdp = getattr(said, "use_megatron_fsdp", False) or getattr(container.ddp, "use_megatron_fsdp", False)
    return "megatron_fsdp" if fsdp else DEFAULT


def _section(container: Any, name: str, made: Plan) -> dict[str, Any]:
    """A section as the run will have it: megatron-core's defaults, the container's values, the recipe's."""
    said = as_mapping(name, getattr(container, name), [])
    found = filled(name, {key: value for key, value in said.items() if _is_data(value)}) | made.of(name)
    return {key: plain(value) for key, value in found.items() if _is_data(value)}


def _is_data(value: Any) -> bool:
    try:
        plain(value)
    except (ValueError, TypeError):
        return False
    return True


def _facts(container: Any, policy: PrecisionPolicy, made: Plan) -> RunFacts:
    model, optimizer, ddp = (_section(container, name, made) for name in ("model", "optimizer", "ddp"))
    engine, train = _engine(container), container.train
    # Bridge turns it on for both when either says so
    sharded = bool(optimizer["use_distributed_optimizer"] or ddp["use_distributed_optimizer"])
    ddp["use_distributed_optimizer"] = optimizer["use_distributed_optimizer"] = sharded
    group = torch.distributed
    there = group.is_available() and group.is_initialized()
    world = group.get_world_size() if there else int(os.environ.get("WORLD_SIZE", "1"))
    rows = getattr(container.model, "vocab_size", None) or getattr(container.tokenizer, "vocab_size", None) or 1
    return RunFacts(
        shape=model_shape(model, vocab_size=rows, seq_length=getattr(container.model, "seq_length", 1)),
        parallel=live_parallel(container.model, world),
        engine=engine,
        optimizer=OptimizerFacts(
            name=updater(optimizer["optimizer"], policy, traits(engine)),
            distributed=sharded,
            cpu_offload=bool(optimizer["optimizer_cpu_offload"]),
            overlap_param_gather_with_step=bool(optimizer["overlap_param_gather_with_optimizer_step"]),
            settings=optimizer,
        ),
        model=model,
        ddp=ddp,
        micro_batch_size=train.micro_batch_size or 1,
        global_batch_size=train.global_batch_size or 1,
    )


def _bridges(container: Any, policy: PrecisionPolicy, recipe: AnyRecipe) -> Iterator[str]:
    """What Bridge does to precision between this call and the first step, and what a later run cannot load."""
    mixed, ddp, optimizer = container.mixed_precision, container.ddp, container.optimizer
    if mixed is not None and not (isinstance(mixed, str) and key(mixed) == key(str(recipe))):
        name = mixed if isinstance(mixed, str) else type(mixed).__name__
        yield f"mixed_precision={name} becomes None: Bridge would write its fields over the recipe's when it starts"
    if ddp.use_distributed_optimizer != optimizer.use_distributed_optimizer:
        yield "ddp.use_distributed_optimizer and optimizer.use_distributed_optimizer differ: Bridge turns both on"
    if getattr(container, "comm_overlap", None) is not None:
        yield "comm_overlap decides ddp.overlap_grad_reduce and ddp.overlap_param_gather after this plan, which was judged with their present values"
    files = getattr(container, "checkpoint", None)
    if policy.stored and (getattr(files, "save", None) or getattr(files, "load", None)) and not _loads_quantized():
        yield (
            "checkpoints of this run cannot be loaded again: this Transformer Engine's quantized weights are no safe globals of torch.load. To resume, keep "
            f"the weights in {policy.compute.short} (fp{policy.quant.bits if policy.quant else 8}_param_gather=false), or use a Transformer Engine that registers them (2.20 does)"
        )


def _loads_quantized() -> bool:
    # torchao has a Float8Tensor too
    known = torch.serialization.get_safe_globals()
    return any(str(getattr(one, "__module__", "")).startswith("transformer_engine") for one in known)
