"""What Megatron-FSDP of megatron-core 0.16.1 can and cannot be asked for: defaults filled in, the rest refused with its reason."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from mpbridge.engines.configs import sections as core_sections
from mpbridge.errors import Refused
from mpbridge.formats import DType

if TYPE_CHECKING:
    from mpbridge.config.container import Run

log = logging.getLogger("mpbridge")

BROKEN = {
    "no_shard": (
        "its all_reduce_gradients skips every buffer that exists (an inverted test in param_and_grad_buffer.py of 0.16.1), so ranks train apart; and where "
        "gradients are reduced, the norm counts each replica once more, sqrt(data-parallel size) times too much"
    ),
}
"""data_parallel_sharding_strategy -> why it is refused."""


def refuse(run: Run, *, cuda: bool) -> None:
    """Raises Refused with everything about `run` that this wrapper would not do as asked."""
    faults = [*_layout_faults(run), *_dtype_faults(run)]
    if cuda and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        faults.append("CUDA_DEVICE_MAX_CONNECTIONS=1 keeps its communication from overlapping with compute: unset it")
    if faults:
        raise Refused("\n".join(["this run cannot go on Megatron-FSDP:", *(f"  - {fault}" for fault in faults)]))


def _layout_faults(run: Run) -> list[str]:
    sizes, ddp, optimizer = run.facts.parallel, run.inputs["ddp"], run.inputs["optimizer"]
    faults = [
        f"{name} parallelism of {getattr(sizes, name)}: only data parallelism here, set it to 1"
        for name in ("tensor", "pipeline", "context", "expert")
        if getattr(sizes, name) > 1
    ]
    strategy = ddp.get("data_parallel_sharding_strategy")
    if strategy in BROKEN:
        faults.append(
            f"ddp.data_parallel_sharding_strategy={strategy}: {BROKEN[strategy]}; use optim_grads_params (the default), optim_grads or optim"
        )
    if (ddp.get("num_distributed_optimizer_instances") or 1) > 1:
        faults.append("ddp.num_distributed_optimizer_instances above 1 (hybrid sharding): not offered here, set it to 1")
    if ddp.get("use_distributed_optimizer") is False:
        faults.append("ddp.use_distributed_optimizer=false: the wrapper shards the states in any case; drop it")
    if optimizer.get("optimizer", "adam") not in ("adam", "sgd"):
        faults.append(f"optimizer.optimizer={optimizer['optimizer']}: adam or sgd")
    return faults


def _dtype_faults(run: Run) -> list[str]:
    policy = run.policy
    faults = []
    if policy.params is not policy.compute:
        faults.append(
            f"{policy.params.short} storage under {policy.compute.short} compute: model weights rest in the compute dtype, the FP32 copy is the wrapper's; "
            "use bf16_megatron_fsdp, or engine=fsdp2 with fp32_params_bf16_compute"
        )
    if policy.main_params not in (None, DType.FP32, policy.params):
        faults.append(
            f"main_params_dtype={policy.main_params.short}: the wrapper of 0.16.1 keeps FP32 main weights or none (preserve_fp32_weights)"
        )
    wanted = DType.FP32 if policy.main_params_owner != "params" else policy.reduce
    if policy.main_grads not in (None, wanted):
        faults.append(
            f"main_grads_dtype={policy.main_grads.short}: 0.16.1 hands gradients to the optimizer in its weights' dtype, {wanted.short}"
        )
    if policy.main_params_owner == "params" and policy.params is not DType.FP32 and policy.reduce is DType.FP32:
        faults.append(
            "grad_reduce_in_fp32=true without main weights: the gradient would be rounded to the parameters' dtype anyway; set it to false"
        )
    if policy.stored:
        faults.append("weights stored in FP8 or FP4: not offered with this engine; set fp8_param_gather=false, or engine=mcore")
    if policy.keep_fp32:
        faults.append("keep_fp32: one parameter group has one dtype here; use engine=fsdp2")
    return faults


def sections(run: Run, *, cuda: bool) -> dict[str, Any]:
    """The run's inputs with what the wrapper needs: the distributed optimizer's flag, a sharding strategy, and no NCCL-only reduction on gloo."""
    inputs: dict[str, Any] = core_sections(run, cuda=cuda)
    if not run.inputs["ddp"].get("use_distributed_optimizer"):
        log.info("Megatron-FSDP shards optimizer states: ddp.use_distributed_optimizer is on")
    inputs["ddp"] |= {"use_megatron_fsdp": True, "use_distributed_optimizer": True}
    inputs["optimizer"]["use_distributed_optimizer"] = True
    if inputs["ddp"].get("data_parallel_sharding_strategy") is None:
        inputs["ddp"]["data_parallel_sharding_strategy"] = "optim_grads_params"
    if not cuda:
        # the fused multiply is NCCL's PREMUL_SUM
        inputs["ddp"]["gradient_reduce_div_fusion"] = False
    return inputs
