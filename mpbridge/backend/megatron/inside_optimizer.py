"""Internals of megatron-core's optimizers: which tensors they hold for a parameter, which gradients they read, and how they group parameters."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from mpbridge.common.errors import Refused
from mpbridge.common.upstream import Patch, replaced
from mpbridge.precision.megatron_spec import versions


def parts(optimizer: Any) -> list[Any]:
    """The optimizers of a ChainedOptimizer that hold anything, or the optimizer itself if it is not chained; a rank without parameters has stubs."""
    found = getattr(optimizer, "chained_optimizers", None)
    there = [optimizer] if found is None else found
    return [part for part in there if part is not None and not getattr(part, "is_stub_optimizer", False)]


def main_weights(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(model parameter, the tensor that the inner optimizer updates for it) of one of megatron-core's optimizers."""
    if hasattr(part, "shard_fp32_groups"):
        sixteen = part.shard_float16_groups if reads_decoupled(part) else part.shard_fp32_from_float16_groups
        groups = [(part.model_float16_groups, sixteen), (part.model_fp32_groups, part.shard_fp32_groups)]
    elif hasattr(part, "fp32_from_float16_groups"):
        wide = part.fp32_from_fp32_groups
        groups = [(part.float16_groups, part.fp32_from_float16_groups), (wide, wide)]
    else:
        own = [group["params"] for group in part.optimizer.param_groups]
        groups = [(own, own)]
    for models, mains in groups:
        for model_group, main_group in zip(models, mains, strict=True):
            yield from zip(model_group, main_group, strict=True)


def read_in_place_of(part: Any, updated: torch.Tensor) -> torch.Tensor:
    """The tensor whose gradient an update reads: HybridDeviceOptimizer copies gradients to its main weights; elsewhere the given one."""
    inner: Mapping[torch.Tensor, torch.Tensor] = getattr(part.optimizer, "param_to_inner_param", {})
    return inner.get(updated, updated)


_FLAG = "HAVE_EMERGING_OPTIMIZERS"


def emerging(config: Any, chunks: list[Any]) -> Any:
    """megatron-core's own Muon, SOAP or Lion beside its Adam. Raises Refused without Emerging-Optimizers, whose absence megatron-core 0.16 only asserts."""
    from megatron.core import optimizer
    from megatron.core.optimizer import muon

    name = config.optimizer
    # the flag moved in 0.18, and with it the release that it asks for
    apart = hasattr(muon, _FLAG)
    if not getattr(muon if apart else optimizer, _FLAG):
        raise Refused(versions.emerging(name, versions.current()))
    try:
        return muon.get_megatron_muon_optimizer(config, chunks, layer_wise_distributed_optimizer=name == "dist_muon")
    finally:
        config.optimizer = name  # 0.16 writes "adam"


def factors_stored() -> AbstractContextManager[None]:
    """Context in which megatron-core makes checkpoint tensors of SOAP's factors.

    Its `make_sharded_optimizer_tensor` (0.16.1 to 0.20) asserts that a state has its parameter's shape. A rank's factors are of its own block of the matrix:
    they get a dimension in front, by block.
    """
    from megatron.core.dist_checkpointing import optimizer as made
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    own = made.make_sharded_optimizer_tensor

    def make(parameter: Any, state: torch.Tensor, prefix: str) -> Any:
        if not isinstance(parameter, ShardedTensor) or tuple(state.shape) == parameter.local_shape:
            return own(parameter, state, prefix)
        front = parameter.prepend_axis_num
        blocks, index = parameter.axis_fragmentations[front:], 0
        for count, offset, size in zip(blocks, parameter.global_offset[front:], parameter.local_shape, strict=True):
            index = index * count + offset // size
        there, whole = (*parameter.global_offset[:front], index), (*parameter.global_shape[:front], math.prod(blocks))
        return dataclasses.replace(
            parameter,
            key=f"{prefix}.{parameter.key}",
            data=state,
            dtype=state.dtype,
            local_shape=tuple(state.shape),
            global_shape=(*whole, *state.shape),
            global_offset=(*there, *(0 for _ in state.shape)),
            axis_fragmentations=(*parameter.axis_fragmentations[:front], math.prod(blocks), *(1 for _ in state.shape)),
            prepend_axis_num=front + 1,
        )

    return replaced((made, "make_sharded_optimizer_tensor", make))


def number_states(optimizer: Any) -> None:
    """Corrects where distributed optimizers look for a parameter's states: megatron-core (0.16.1 to 0.20) counts 16-bit and FP32 parameters of a group in
    one order and hands them to the inner optimizer in another, so checkpoints of a group with both had states under other parameters' names; and tells
    groups apart that differ only in their rate."""
    for part in parts(optimizer):
        for group in getattr(part.optimizer, "param_groups", ()):
            # 0.16.1 leaves it False; on loading, it then takes the group of optimizer.decoupled_lr for the one that is otherwise the same
            group["is_decoupled_lr"] |= not group.get("default_config", True)
        known = getattr(part, "model_param_group_index_map", None)
        if not known:
            continue
        places = {
            id(updated): (at, order)
            for at, group in enumerate(part.optimizer.param_groups)
            for order, updated in enumerate(group["params"])
        }
        known |= {parameter: places[id(updated)] for parameter, updated in main_weights(part) if id(updated) in places}


def in_order(optimizer: Any) -> AbstractContextManager[None]:
    """Context in which megatron-core saves and loads plain optimizers that hold FP32 parameters beside 16-bit ones.

    Its `Float16OptimizerWithFloat16Params.sharded_state_dict` (0.16.1 to 0.20) numbers only the 16-bit ones, so it fails for FP32 parameters, or names
    states after other parameters. Here its lists have all of them, in the order of the inner optimizer's groups; FP32 ones are their own main weights.
    """
    mixed = [part for part in parts(optimizer) if any(getattr(part, "fp32_from_fp32_groups", ()))]
    patches: list[Patch] = []
    for part in mixed:
        models = {id(updated): parameter for parameter, updated in main_weights(part)}
        groups = [list(group["params"]) for group in part.optimizer.param_groups]
        of_models = [[models[id(updated)] for updated in group] for group in groups]
        patches += [(part, "float16_groups", of_models), (part, "fp32_from_float16_groups", groups)]
    return replaced(*patches)


def shard_of(part: Any, parameter: Any) -> tuple[int, int] | None:
    """(begin, end) of the part of a flat model parameter that a distributed optimizer updates on this rank; None: all of it."""
    if not hasattr(part, "shard_fp32_groups"):
        return None
    where = part._get_model_param_range_map(parameter)["param"]
    return int(where.start), int(where.end)


def reads_decoupled(part: Any) -> bool:
    """Whether this optimizer reads its gradients from `.decoupled_grad`."""
    return bool(part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8)


def never_decoupled(config: Any) -> None:
    """Makes an OptimizerConfig read gradients from `.grad`, whatever it derived."""
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = False


def gradients(part: Any) -> list[torch.Tensor]:
    """The local gradients that this optimizer is about to read."""
    name = "decoupled_grad" if reads_decoupled(part) else "grad"
    found = [getattr(parameter, name, None) for parameter in part.get_parameters()]
    return [getattr(grad, "_local_tensor", grad) for grad in found if grad is not None]


def gradients_for_norm(part: Any) -> list[torch.Tensor]:
    """The local gradients that count towards the global norm on this rank, each parameter once."""
    name = "get_grads_for_grad_norm" if hasattr(part, "get_grads_for_grad_norm") else "get_main_grads_for_grad_norm"
    return getattr(part, name)()  # type: ignore[no-any-return]


def counted_gradients(optimizer: Any, named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, the part of the parameter's reduced gradient that this rank counts), so that each element is counted once over all ranks: nothing of a replica, a
    shared copy or a tensor-parallel duplicate; for a gradient that a distributed optimizer shards, the flat part that was reduced here.
    """
    some = parts(optimizer)
    sharded = any(hasattr(part, "shard_fp32_groups") for part in some)
    holders = {id(parameter): part for part in some for parameter, _ in main_weights(part)}
    for name, parameter in named:
        part = holders.get(id(parameter))
        if not parameter.requires_grad or not _original(parameter):
            continue
        if not sharded and _replica(parameter) == 0:
            yield name, parameter.main_grad
        # several instances of a distributed optimizer reduce to the same gradients
        elif sharded and part is not None and part.distributed_optimizer_instance_id == 0:
            start, end = shard_of(part, parameter) or (0, parameter.main_grad.numel())
            yield name, parameter.main_grad.view(-1)[start:end]


def _original(parameter: Any) -> bool:
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    return bool(param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter))


def _replica(parameter: Any) -> int:
    """Rank within the group that holds the same part of that parameter."""
    from megatron.core import parallel_state

    if not getattr(parameter, "allreduce", True):
        return int(parallel_state.get_expert_data_parallel_rank())
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))


def set_moment_dtypes(part: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Makes FusedAdam keep its moments in `dtypes`; other optimizers are left alone."""
    held = getattr(getattr(part, "optimizer", None), "name_to_dtype_map", None)
    if held is not None:
        held.update(dtypes)


def gather_mxfp8(optimizer: Any) -> None:
    """Copies main weights into the buffers through which parameters are gathered; megatron-core leaves this to the training script.

    Its function (0.16.1 to 0.20) leaves out FP32 parameters, such as adapters, whose buffer it then gathers as the zeros of the step before.
    """
    for part in optimizer.chained_optimizers:
        part._copy_main_params_to_param_buffer()
        for mains, models in zip(part.shard_fp32_groups, part.model_fp32_groups, strict=True):
            for main, parameter in zip(mains, models, strict=True):
                buffer, _, bucket = part.model_param_gbuf_map[parameter]
                place = part._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
                part.buffers[buffer].buckets[bucket].param_data.view(-1)[place.start : place.end].copy_(main.detach())


def padded(chunk: Any) -> Any:
    """The wrapped chunk, whose buckets find every parameter where its buffer has it.

    megatron-core 0.16.1 aligns each parameter to 64 elements in the buffer, and a bucket's `param_to_index` counts without that padding
    (distributed/param_and_grad_buffer.py): what follows a parameter of another size, such as dt_bias of 32 heads, is copied back from the wrong place after a
    gather through the gradient buffer.
    """
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        for bucket in buffer.buckets:
            for parameter in bucket.params:
                first, last, _ = buffer.param_index_map[parameter]
                bucket.param_to_index[parameter] = (first - bucket.offset, last - bucket.offset)
    return chunk


def gather_now(chunks: list[Any]) -> None:
    """Gathers the parameters between steps, which otherwise the next forward pass would do.

    megatron-core marks them as gathered, and the next forward pass then skips what follows a gather: FP8 weights would keep the transposes of the previous
    step (`finish_param_sync` of 0.16.1: `post_all_gather_processing` runs only after its own gathers).
    """
    from megatron.core.fp8_utils import is_float8tensor, post_all_gather_processing

    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)
        quantized = [parameter for parameter in chunk.parameters() if is_float8tensor(parameter)]
        if quantized:
            post_all_gather_processing(quantized)


def refresh_mxfp8(chunks: list[Any], optimizer: Any) -> None:
    """Updates MXFP8 weights between steps through the gradient buffer, whose contents are restored.

    `start_param_sync(force_sync=True)` would gather what the buffer holds at that point, the gradients, and mark the weights as gathered:
    the next forward pass would then read this rank's shard and zeros.
    """
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    kept = [buffer.grad_data.clone() for buffer in buffers]
    gather_mxfp8(optimizer)
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if group.param_gather_handle is None:
                group.start_param_sync()
            group.finish_param_sync(skip_next_bucket_dispatch=True)
            group.param_gather_dispatched = False  # the next forward pass gathers as usual
    for buffer, data in zip(buffers, kept, strict=True):
        buffer.grad_data.copy_(data)


def parameter_groups(parameters: Mapping[str, Any], config: Any) -> list[dict[str, Any]]:
    """megatron-core's own groups of named parameters: no weight decay for biases and norms, multipliers, minimum rates."""
    from megatron.core.optimizer import _get_param_groups, get_standard_config_overrides

    model = SimpleNamespace(named_parameters=parameters.items)
    # since 0.17 None means no rules at all, so norms would decay
    return _get_param_groups([model], config, get_standard_config_overrides(config))  # type: ignore[no-any-return]


def update_router_biases(chunks: list[Any], config: Any) -> None:
    """Updates the routers' load-balancing biases, once the tokens of a step are counted."""
    from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias

    _update_router_expert_bias(chunks, config)
