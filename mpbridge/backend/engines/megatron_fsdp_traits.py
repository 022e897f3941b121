"""The traits of `MegatronFsdpEngine`, and the rules that are checked for its runs only."""

from mpbridge.common.formats import DType, say
from mpbridge.common.traits import EngineTraits
from mpbridge.planning.memory.keeps import STATES
from mpbridge.planning.rules.base import ARGUMENTS, Case, Rule
from mpbridge.precision.policy import own_main


def _main_grads(case: Case) -> str | None:
    policy = case.policy
    wanted = policy.reduce if own_main(policy) else DType.FP32
    if policy.main_grads in (None, wanted):
        return None
    return f"main_grads_dtype={say(policy.main_grads)} on Megatron-FSDP, whose optimizer reads {wanted.short}"


RULES: tuple[Rule, ...] = (
    Rule(
        id="reused-buffer-under-megatron-fsdp",
        about="mxfp8 stored",
        when=lambda c: c.policy.reuse_grad_buffer,
        found="reuse_grad_buf_for_mxfp8_param_ag=true on Megatron-FSDP",
        expected="false: Megatron-FSDP has its own buffers",
        cure="mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=false",
        source=ARGUMENTS,
        emulated="warning",
    ),
    Rule(
        id="megatron-fsdp-main-weights",
        when=lambda c: c.policy.main_params not in (None, DType.FP32, c.policy.params),
        found=lambda c: f"main_params_dtype={say(c.policy.main_params)} on Megatron-FSDP",
        expected="fp32, or the parameters' own dtype: the wrapper supports these two only",
        cure="mixed_precision.main_params_dtype=fp32",
        source="megatron-core 0.16.1 distributed_data_parallel_config.py (preserve_fp32_weights, a switch); mpbridge/backend/engines/megatron_fsdp.py",
    ),
    Rule(
        id="megatron-fsdp-unsharded",
        when=lambda c: c.ddp("data_parallel_sharding_strategy") == "no_shard",
        found="ddp.data_parallel_sharding_strategy=no_shard",
        expected="a mode that shards: with no_shard, all_reduce_gradients of 0.16 skips every existing buffer (an inverted test), so the ranks diverge; and where "
        "gradients are reduced, the norm counts every replica",
        cure="ddp.data_parallel_sharding_strategy=optim_grads_params (the default), optim_grads or optim, or engine=mcore",
        source="megatron-core 0.16.1 megatron_fsdp/param_and_grad_buffer.py; measured on gloo: on 0.20 the norm of two ranks is sqrt(2) times too large",
    ),
    Rule(
        id="megatron-fsdp-instances",
        when=lambda c: c.ddp("num_distributed_optimizer_instances", 1) > 1,
        found="hybrid sharding (num_distributed_optimizer_instances above 1)",
        expected="one instance",
        cure="ddp.num_distributed_optimizer_instances=1",
        source="mpbridge/backend/engines/megatron_fsdp.py",
    ),
    Rule(
        id="megatron-fsdp-keeps-one-dtype",
        when=lambda c: c.policy.keep_fp32,
        found="keep_fp32 on Megatron-FSDP",
        expected="one dtype per parameter group",
        cure="engine=fsdp2, or drop keep_fp32",
        source="mpbridge/backend/engines/megatron_fsdp.py",
    ),
    Rule(
        id="megatron-fsdp-main-gradients",
        found=_main_grads,
        expected="gradients in the dtype of the weights that the optimizer updates",
        cure="mixed_precision.main_grads_dtype=null",
        source="mpbridge/backend/engines/megatron_fsdp.py; megatron-core 0.16.1 megatron_fsdp",
    ),
    Rule(
        id="megatron-fsdp-connections",
        when=lambda c: c.run.environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1",
        found="CUDA_DEVICE_MAX_CONNECTIONS=1 on Megatron-FSDP",
        expected="more than one: with one, gathers and GEMMs wait for each other",
        cure="unset CUDA_DEVICE_MAX_CONNECTIONS",
        source=ARGUMENTS,
    ),
)


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
    rules="mpbridge.backend.engines.megatron_fsdp_traits:RULES",
)
