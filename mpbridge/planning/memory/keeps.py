"""Who keeps which copy of a parameter, in which dtype, and how it is sharded: the single source for memory, rules, engines, audit, fingerprints and
tables."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Literal

from mpbridge.common.facts import ADAMS, BESIDE_ADAM, FACTORS, MUONS, OPTIMIZERS, STATE_ROLES, OptimizerFacts, RunFacts
from mpbridge.common.formats import DType
from mpbridge.common.traits import EngineTraits, Sharding, attribute
from mpbridge.precision.globs import ADAPTERS, is_adapter
from mpbridge.precision.megatron_spec.versions import SINCE_020
from mpbridge.precision.policy import PrecisionPolicy, own_main

Owner = Literal["model", "wrapper", "engine", "optimizer"]
"""Who allocates it. 'engine': megatron-core's optimizer classes, or the sharded wrapper; 'optimizer': the torch optimizer inside."""
_EMPTY: Mapping[str, Any] = MappingProxyType({})
MOMENTS: Mapping[str, tuple[str, DType | None]] = MappingProxyType(
    {"exp_avg": ("first moment", DType.FP32), "exp_avg_sq": ("second moment", DType.FP32)}
)
"""Role of a state of Adam, which is also the policy's fact -> its words, and its dtype where the policy leaves it open (None: then there is none)."""
STATES = ("main_params", "main_grads", *MOMENTS, "factors")
"""Roles held by the rank that updates a parameter."""
FROZEN = "frozen"
"""In the place of the optimizer of a parameter that is not trained: it is stored, and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One role of one parameter between updates, once optimizer states exist."""

    dtype: DType
    """Storage dtype: FP8 and FP4 are UINT8, the lower halves of main weights INT16."""
    owner: Owner
    sharding: Sharding
    view_of: str | None = None
    """The role whose memory it shares; None: it has its own memory."""


def keeps(
    policy: PrecisionPolicy,
    engine: EngineTraits,
    optimizer: OptimizerFacts,
    *,
    at_rest: DType | None = None,
    ddp: Mapping[str, Any] = _EMPTY,
    trained: str | None = None,
) -> Mapping[str, Holding]:
    """Role -> what is stored for a parameter; a role that is absent has no tensor.

    policy: settled. trained: by which optimizer (`trained_by`); None: the run's. at_rest: dtype of the stored parameter, UINT8 in low precision; None: the policy's. ddp: the ddp section, which determines what is sharded.
    """
    rests, optimizer = at_rest or policy.params, replace(optimizer, name=trained or optimizer.name)
    if trained == FROZEN:
        sharding = engine.sharded("params", distributed=optimizer.distributed, ddp=ddp)
        return MappingProxyType({"params": Holding(dtype=rests, owner="model", sharding=sharding)})
    if offloaded(engine, optimizer):
        states: dict[str, Any] = dict.fromkeys(("main_params", *moments(policy)), DType.FP32)
        policy = replace(policy, remainders=False, **states)
    own = attribute(engine.keeps) if engine.keeps else functools.partial(_usual, engine=engine)
    held = {}
    for role, (dtype, owner, view) in own(policy, optimizer, rests).items():
        sharding = engine.sharded(role, distributed=optimizer.distributed, ddp=ddp)
        held[role] = Holding(dtype=dtype, owner=owner, sharding=sharding, view_of=view)
    return MappingProxyType(held)


def is_frozen(policy: PrecisionPolicy, parameter: str) -> bool:
    """Whether `frozen` covers the parameter with that global name: never an adapter's."""
    if not policy.frozen:  # asked for every parameter of every candidate of a search
        return False
    return any(fnmatchcase(parameter, pattern) for pattern in policy.frozen) and not is_adapter(parameter)


def trained_by(
    optimizer: str, parameter: str, dimensions: int, policy: PrecisionPolicy | None = None, core: str | None = None
) -> str:
    """OptimizerFacts.name of what trains a parameter with that global name: beside Muon and its like, which take hidden matrices, Adam trains the rest; FROZEN: nothing.

    core: megatron-core's version.

    Source: megatron-core 0.16.1 optimizer/muon.py, 0.20 optimizer/emerging_optimizers.py; torch.optim.Muon takes matrices only."""
    if policy is not None and is_frozen(policy, parameter):
        return FROZEN
    # megatron-core marks these two alone, so learned positions are a hidden matrix to it
    outside = parameter.startswith(("embedding.word_embeddings.", "output_layer."))
    # ssm/mamba_mixer.py use_muon: several matrices in one, of which Muon would make one
    packed = optimizer in MUONS and parameter.endswith(".mixer.in_proj.weight")
    outside |= packed and core is not None and SINCE_020.holds(core)
    return "adam" if optimizer in BESIDE_ADAM and (dimensions != 2 or outside) else optimizer


def elements_of(role: str, shape: tuple[int, ...], elements: int) -> int:
    """Elements of one of STATES for a parameter of which a rank updates so many elements: SOAP's factors are square, of every dimension."""
    return len(FACTORS) // 2 * sum(size * size for size in shape) if role == "factors" else elements


def _usual(
    policy: PrecisionPolicy, optimizer: OptimizerFacts, rests: DType, engine: EngineTraits
) -> dict[str, tuple[DType, Owner, str | None]]:
    """Role -> (dtype, owner, the role whose memory it shares) on an engine with one of the usual kinds of main weights."""
    found: dict[str, tuple[DType, Owner, str | None]] = {}
    outer: Owner = "engine" if engine.distributed_optimizer != "optional" else "wrapper"
    mine: Owner = "model" if outer == "wrapper" and not optimizer.distributed else outer
    grads = _grads(policy, engine, rests)
    found["params"] = (rests, mine, None)
    found["grads"] = (grads, outer, None)
    main = _main_params(policy, engine, optimizer, rests)
    if main is not None:
        found["main_params"] = (*main, None)
    updated = rests if main is None else DType.FP32 if main[0] is DType.INT16 else main[0]
    if engine.main_weights != "optimizer":
        # FusedAdam reads a gradient in its own dtype; the hybrid optimizer's main weights have one in theirs
        decoupled = main is not None and main[1] == "optimizer" and not offloaded(engine, optimizer)
        read = grads if decoupled or main is None else main[0]
        found["main_grads"] = (read, outer if read is grads else "engine", "grads" if read is grads else None)
    for role, dtype in _moments(policy, engine, optimizer, _face(policy, updated)):
        found[role] = (dtype, "optimizer", None)
    return found


def keeps_of(policy: PrecisionPolicy, run: RunFacts) -> Mapping[str, Holding]:
    """`keeps` for a run. The policy may leave optimizer facts open."""
    return keeps(policy.settled(dict(run.optimizer.settings)), run.traits, run.optimizer, ddp=run.ddp)


def kept_fp32(policy: PrecisionPolicy, parameter: str) -> bool:
    """Whether `keep_fp32` covers the parameter with that global name."""
    adapter = is_adapter(parameter)
    return any(fnmatchcase(parameter, glob) or (glob in ADAPTERS and adapter) for glob in policy.keep_fp32)


def wires(policy: PrecisionPolicy, *, at_rest: DType | None = None, kept: bool = False) -> Mapping[str, DType]:
    """{'gradients', 'parameters'} -> dtype of a parameter's elements in data-parallel communication. kept: `keep_fp32` covers it."""
    rests = at_rest or policy.params
    if kept:
        return {"gradients": DType.FP32, "parameters": DType.FP32}
    return {"gradients": policy.reduce, "parameters": rests if rests is DType.UINT8 else policy.gather or rests}


def offloaded(engine: EngineTraits, optimizer: OptimizerFacts) -> bool:
    """Whether megatron-core's HybridDeviceOptimizer keeps the states: all in FP32, on either device, since it is given no dtypes.

    Source: megatron-core 0.16.1 and d98e8a64, optimizer/__init__.py (param_update_in_fp32=True) and cpu_offloading/hybrid_optimizer.py."""
    return optimizer.cpu_offload and engine.main_weights == "megatron_core"


def resident(run: RunFacts) -> float:
    """The share of the optimizer's states that is on the GPU: not that of optimizer_offload_fraction, whose default is none."""
    away = float(run.optimizer.settings.get("optimizer_offload_fraction") or 0.0)
    return 1 - away if offloaded(run.traits, run.optimizer) else 1.0


def updater(asked: str, policy: PrecisionPolicy, engine: EngineTraits) -> str:
    """OptimizerFacts.name of a settled policy: on engines where only FusedAdam could hold main weights, "adam" is torch's own if that can keep the policy's states."""
    torchs = asked == "adam" and engine.main_weights == "optimizer" and not fused(policy, engine)
    return "torch_adamw" if torchs else asked


def fused(policy: PrecisionPolicy, engine: EngineTraits) -> bool:
    """Whether Adam has to be Transformer Engine's FusedAdam: torch's holds no main weights, and its moments have the dtype of the tensor it updates."""
    if engine.main_weights == "megatron_core" or policy.precision_aware:
        return True
    main = policy.main_params or DType.FP32
    updated = main if engine.main_weights == "wrapper" else policy.params
    return {main, *moments(policy).values()} != {updated}


def moments(policy: PrecisionPolicy) -> Mapping[str, DType]:
    """Role -> dtype of Adam's states as the policy has them."""
    stated = {role: getattr(policy, role) or usual for role, (_, usual) in MOMENTS.items()}
    return {role: dtype for role, dtype in stated.items() if dtype is not None}


def _face(policy: PrecisionPolicy, dtype: DType) -> DType:
    """The dtype that torch reports: an FP8 weight reports its 16-bit dtype."""
    return policy.params if dtype is DType.UINT8 else dtype


def _grads(policy: PrecisionPolicy, engine: EngineTraits, rests: DType) -> DType:
    """FSDP2 casts a reduced gradient to its parameter's dtype; megatron-core's wrappers have buffers in FP32 or in the parameter's dtype."""
    if engine.main_weights == "wrapper" and policy.accumulate is not None:
        return policy.accumulate
    if policy.reduce is DType.FP32 and engine.main_weights != "optimizer":
        return DType.FP32
    return _face(policy, rests)


def _main_params(
    policy: PrecisionPolicy, engine: EngineTraits, optimizer: OptimizerFacts, rests: DType
) -> tuple[DType, Owner] | None:
    """(dtype, owner) of the separate copy that the optimizer updates; None: it updates the parameter itself."""
    wanted = policy.main_params or DType.FP32
    # the lower half of an FP32 main weight; the BF16 parameter is the upper half (fused_adam.py)
    halves = bool(policy.precision_aware and policy.remainders) and rests is DType.BF16 and wanted is DType.FP32
    by_fused: tuple[DType, Owner] = (DType.INT16 if halves else wanted, "optimizer")
    if engine.main_weights == "wrapper":
        return None if own_main(policy) or rests is DType.FP32 else (wanted, "engine")
    if engine.main_weights == "optimizer":
        adam = optimizer.name == "adam" and fused(policy, engine)
        return by_fused if adam and rests is not DType.FP32 and not own_main(policy) else None
    if _core_hands_over(policy, optimizer):
        # for FP32 parameters too, where nothing reads it (rule duplicate-main-weights)
        return by_fused
    if rests is DType.FP32 or (own_main(policy) and not optimizer.distributed):
        return None
    return DType.FP32, "engine"


def _core_hands_over(policy: PrecisionPolicy, optimizer: OptimizerFacts) -> bool:
    """megatron-core's use_precision_aware_optimizer_no_fp8_or_ds_fp8 (optimizer_config.py): FusedAdam holds the main weights."""
    lower = (policy.main_params or DType.FP32) is not DType.FP32
    quick = policy.fp8 is None or policy.fp8.row.history
    return bool(policy.precision_aware) and (lower or quick or optimizer.cpu_offload)


def _moments(
    policy: PrecisionPolicy, engine: EngineTraits, optimizer: OptimizerFacts, updated: DType
) -> tuple[tuple[str, DType], ...]:
    """(role, dtype) of the optimizer's states for a parameter; updated: dtype of the tensor that it updates."""
    if optimizer.name not in ADAMS:
        plain = optimizer.name == "sgd" and not optimizer.settings.get("sgd_momentum", 0.9)
        return () if plain else tuple((STATE_ROLES[key], updated) for key in OPTIMIZERS[optimizer.name])
    stated = tuple(moments(policy).items())
    if engine.main_weights == "megatron_core":
        # its FusedAdam gets its state dtypes from the precision-aware optimizer, and from engines/steps.py
        if policy.precision_aware or (policy.narrow_alone and not optimizer.distributed):
            return stated
        return tuple((role, DType.FP32) for role, _ in stated)
    return stated if fused(policy, engine) else tuple((role, updated) for role, _ in stated)
