"""wrap(): what a recipe needs around a model in a custom training loop, beyond the fields that `apply` writes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mpbridge.common.errors import BadValue, Refused
from mpbridge.common.formats import dtype
from mpbridge.precision.sync.plan import Plan
from mpbridge.precision.sync.targets import read
from mpbridge.precision.sync.unkept import refuse_unkept


def wrap(model: Any, plan: Plan, optimizer_config: Any, *, ddp_config: Any = None) -> tuple[Any, Any]:
    """(module, optimizer) for a custom loop: the casts, the gradient buffers and the main weights that the plan's recipe promises.

    model: a megatron-core module built from the applied config, or a list of chunks of an interleaved pipeline (then a list is returned). It is
    put into Float16Module under 16 bits and into DistributedDataParallel, whose gradients are in `main_grad`: a torch optimizer that reads
    `.grad` would never see them. plan: the applied plan. ddp_config: None: the planned one. The loop calls `module.zero_grad_buffer()` and
    `optimizer.zero_grad()` before each step, megatron-core's schedule (loss scaling and gradient reduction are hooked up), then
    `optimizer.step()`. Raises BadValue without a plan or a DDP config, Refused when the model was built before the plan was applied,
    when megatron-core would keep other weights than the plan says, or with Megatron-FSDP, which it does not build.
    """
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.optimizer import get_megatron_optimizer

    from mpbridge.backend.megatron.inside_optimizer import padded
    from mpbridge.backend.models.gpt import in_precision

    if not isinstance(plan, Plan) or plan.policy is None:
        raise BadValue(
            f"wrap() got {type(plan).__name__}, expected the Plan of a recipe: mpbridge.plan(policy, model=..., ...)"
        )
    chunks = list(model) if isinstance(model, Sequence) else [model]
    config, ddp = chunks[0].config, plan.targets.get("ddp") if ddp_config is None else ddp_config
    if ddp is None or isinstance(ddp, dict):
        raise BadValue("the plan was made without a live DDP config: pass it to plan(ddp=...), or here as ddp_config=")
    if read(ddp, "use_megatron_fsdp") is True:
        raise Refused(
            "ddp.use_megatron_fsdp=True, and wrap builds plain DDP: engine=megatron_fsdp of mpbridge, or ddp.use_megatron_fsdp=False"
        )
    given = {"model": config, "ddp": ddp, "optimizer": optimizer_config}
    refuse_unkept(dataclasses.replace(plan, writes=(), targets=given))
    wanted, found = plan.policy.params, dtype(config.params_dtype)
    if found is not wanted:  # megatron-core reads config and parameters when it builds, not later
        raise Refused(
            f"the model's config says params_dtype={found.short}, the plan {wanted.short}: call mpbridge.apply(plan) before the model is built"
        )
    chunks = [in_precision(config, chunk, plan.policy) for chunk in chunks]
    plain = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    wrapped = [padded(one) for one in plain]
    optimizer = get_megatron_optimizer(optimizer_config, wrapped)
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    return (wrapped if isinstance(model, Sequence) else wrapped[0]), optimizer
