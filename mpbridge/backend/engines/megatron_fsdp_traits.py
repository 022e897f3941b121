"""The traits of `MegatronFsdpEngine`."""

from __future__ import annotations

from mpbridge.common.traits import EngineTraits
from mpbridge.planning.memory.keeps import STATES

_STATES = frozenset(STATES)
_EVERYTHING = _STATES | {"params", "grads"}

TRAITS = EngineTraits(
    name="megatron_fsdp",
    engine="mpbridge.backend.engines.megatron_fsdp:MegatronFsdpEngine",
    summary="megatron-core's own fully sharded wrapper, which holds the main weights",
    label="Megatron-FSDP",
    layout="even",
    shards=_EVERYTHING,
    sharding_setting="data_parallel_sharding_strategy",
    sharding_levels={"optim": _STATES, "optim_grads": _STATES | {"grads"}, "optim_grads_params": _EVERYTHING},
    distributed_optimizer="always",
    main_weights="wrapper",
    optimizers=("adam", "sgd"),
    exact_memory=False,
    checkpoints="shards",
    ddp_switch="use_megatron_fsdp",
    # megatron-core's own default, no_shard, is the one mode that a rule rejects
    ddp_defaults={"data_parallel_sharding_strategy": "optim_grads_params"},
    refuses={"gradient_accumulation_fusion": "its kernel writes past the wrapper's buckets"},
    rules="mpbridge.backend.engines.megatron_fsdp_rules:RULES",
)
