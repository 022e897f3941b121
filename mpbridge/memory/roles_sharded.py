"""Roles under fully sharded engines: torch FSDP2 and Megatron-FSDP."""

from __future__ import annotations

from collections.abc import Iterator

from mpbridge.facts import RunFacts
from mpbridge.formats import DType
from mpbridge.memory.layers import Parameter
from mpbridge.memory.ranks import Coordinates
from mpbridge.memory.roles import Role, dtype_at_rest, grads_dtype, main_dtype
from mpbridge.precision.policy import PrecisionPolicy


def fsdp2(policy: PrecisionPolicy, run: RunFacts, at: Coordinates, chunk: tuple[Parameter, ...]) -> Iterator[Role]:
    """Every parameter cut along its first dimension; ranks that get fewer rows hold padding. Gradients and moments follow the parameters' shards.

    torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param.py: chunks as torch.chunk cuts them, gradients cast to the parameter's dtype after the reduction.
    """
    ranks = run.parallel.data * run.parallel.context
    aware, main = bool(policy.precision_aware), policy.main_params or DType.FP32
    fused = not policy.torch_adam_suffices
    for parameter in chunk:
        rows = parameter.weight.shape[0]
        width = parameter.weight.elements // max(1, rows)
        each = -(-rows // ranks)
        here = max(0, min(each, rows - at.data * each))
        at_rest, _ = dtype_at_rest(policy, run, parameter)
        size, name = here * width, parameter.name
        yield Role("params", name, at_rest, size, (each - here) * width, "engine")
        yield Role("grads", name, at_rest, size, 0, "engine")
        first = (policy.exp_avg or DType.FP32) if fused else at_rest
        second = (policy.exp_avg_sq or DType.FP32) if fused else at_rest
        if fused and at_rest not in (DType.FP32, main):
            yield Role("main_params", name, main_dtype(policy, at_rest) if aware else main, size, 0, "optimizer")
        yield Role("exp_avg", name, first, size, 0, "optimizer")
        yield Role("exp_avg_sq", name, second, size, 0, "optimizer")


_SHARDED = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""megatron-core's default, "no_shard", is what nobody chooses Megatron-FSDP for: the engine shards everything then."""


def megatron_fsdp(
    policy: PrecisionPolicy, run: RunFacts, at: Coordinates, chunk: tuple[Parameter, ...]
) -> Iterator[Role]:
    """Equal shares of parameters, main weights, gradients and moments, as far as the sharding strategy goes; its buffers' alignment is left out."""
    ranks = run.parallel.data * run.parallel.context
    stage = _SHARDED.get(str(run.ddp.get("data_parallel_sharding_strategy") or "optim_grads_params"), 3)
    keeps = run.ddp.get("preserve_fp32_weights", True) is not False
    aware = bool(policy.precision_aware)

    def share(size: int, from_stage: int, group: int) -> int:
        return -(-size // group) if stage >= from_stage else size

    for parameter in chunk:
        group = run.parallel.expert_data if parameter.weight.expert and run.parallel.expert > 1 else ranks
        at_rest, _ = dtype_at_rest(policy, run, parameter)
        size, name = parameter.weight.elements, parameter.name
        yield Role("params", name, at_rest, share(size, 3, group), 0, "engine")
        yield Role("grads", name, grads_dtype(policy, at_rest), share(size, 2, group), 0, "engine")
        if keeps and at_rest is not DType.FP32:
            yield Role("main_params", name, DType.FP32, share(size, 1, group), 0, "engine")
            if grads_dtype(policy, at_rest) is not DType.FP32:  # torch wants gradients of its parameter's dtype
                yield Role("main_grads", name, DType.FP32, share(size, 1, group), 0, "engine")
        states = (policy.exp_avg or DType.FP32, policy.exp_avg_sq or DType.FP32) if aware else (DType.FP32, DType.FP32)
        for role, dtype in zip(("exp_avg", "exp_avg_sq"), states, strict=True):
            yield Role(role, name, dtype, share(size, 1, group), 0, "optimizer")
