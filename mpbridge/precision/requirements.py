"""Derives hardware, engine and hints from a policy, so that a recipe from a file has the same metadata as a built-in one."""

from __future__ import annotations

from mpbridge.common.formats import DType
from mpbridge.common.traits import DEFAULT, EngineTraits, engine_names, traits
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.scalings import Arch

EPSILON = "Adam epsilon matters more under low precision: try 1e-8 against 1e-5 (Megatron Bridge issue 1178)"
EDGES = "BF16 edge layers help convergence but cost speed (Megatron Bridge issues 651, 1347)"
FOUR_BITS = "keep the last layers in BF16: Llama-3-8B needed four (Megatron Bridge issue 1347)"
LOST_UPDATES = "updates below 2**-9 of a weight are lost: raise the learning rate or choose bf16_mixed_bf16_moments instead (scripts/evidence/show_bf16_adam.py)"


def needs(policy: PrecisionPolicy) -> Arch | None:
    """Lowest compute capability that runs it natively; None: any machine, including a CPU."""
    return max((quant.row.hardware.low for quant in policy.quants), default=None)


def able(policy: PrecisionPolicy, engine: EngineTraits) -> bool:
    """Whether an engine can keep such parameters and compute such GEMMs; other restrictions are rules."""
    libraries = {quant.row.hardware.library for quant in policy.quants}
    stored = engine.stored_weights or not policy.stored
    wide = engine.wide_storage or not policy.mixed or policy.params is not DType.FP32
    return wide and stored and libraries <= engine.quantizers


def engine_for(policy: PrecisionPolicy) -> str | None:
    """The engine that the policy requires: the first capable one if the default is not; None: the default is capable, or none is."""
    if able(policy, traits(DEFAULT)):
        return None
    return next((name for name in engine_names() if able(policy, traits(name))), None)


def hints(policy: PrecisionPolicy) -> tuple[str, ...]:
    """Recommended hyperparameters, each with its source."""
    found = [EPSILON] if policy.quantized else []
    found += [EDGES] if policy.ends is not None else []
    found += [FOUR_BITS] if policy.fp4 is not None and policy.ends is None else []
    found += [LOST_UPDATES] if policy.narrow_alone else []
    return tuple(found)
