"""Internals of Megatron-FSDP's wrapper: its buffers, pending gathers, and workarounds for its bugs."""

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from mpbridge.common.upstream import replaced

BufferRole = Literal["params", "main_params", "grads"]


def wrap(config: Any, ddp: Any, chunk: Any, device: torch.device) -> Any:
    """The wrapper around a model chunk. Since 0.17 the name is a function that chooses between two implementations; this is the first of them."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    kind = getattr(mcore_fsdp_adapter, "FullyShardedDataParallelV1", mcore_fsdp_adapter.FullyShardedDataParallel)
    return kind(config, ddp, chunk, device=device)


def parameters(wrapped: Any) -> dict[str, Any]:
    """Name in the unwrapped model -> the sharded parameter that an optimizer updates."""
    held = wrapped.param_and_grad_buffer.optimizer_named_parameters
    return {bare_name(name): parameter for name, parameter in held}


def bare_name(name: str) -> str:
    """A parameter's name without the prefixes of the wrappers around the model."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def install_main_weights(wrapped: Any) -> None:
    """Copies the main weights into the model weights."""
    wrapped.param_and_grad_buffer.copy_main_weights_to_model_weights()


def settle(wrapped: Any) -> None:
    """Waits for pending gathers."""
    pipeline = wrapped.module.all_gather_pipeline
    while pipeline.param_gather_event_map:
        pipeline.wait_bucket_ready(*next(iter(pipeline.param_gather_event_map)))


def release(wrapped: Any) -> None:
    """Removes the wrapper's hooks from its parameters' gradients, so that an unused model can be freed.

    The hooks reference the wrapper, and torch holds them with the parameters in C++, where Python's garbage collector cannot follow: the model and the threads of its
    process groups would live as long as the process.
    """
    hooks = wrapped.module.grad_acc_hooks
    for hook in hooks.values():
        hook.remove()
    hooks.clear()


def do_not_reduce(wrapped: Any) -> None:
    """Disables the reduction if one process holds everything.

    In that case the wrapper accumulates into the whole gradient buffer and then adds that buffer's own "reduced" copy to it: gradients are twice too large
    after one micro-batch and worse after more (seen on 0.16.1; at two processes they are exact).
    """
    wrapped.module.grad_reduce_pipeline.reduce_gradients = lambda *args, **kwargs: None


def offset(wrapped: Any, name: str, parameter: Any) -> tuple[int, ...]:
    """Where this rank's rows of a parameter begin: the wrapper splits flat buffers at multiples of a row."""
    original, buffer = parameter.orig_param, wrapped.param_and_grad_buffer
    group = buffer.parameter_groups[buffer.param_to_param_group[original]]
    held = group.main_weight_buffer or group.model_weight_buffer
    if held is None:  # no_shard without main weights: the optimizer updates the model's own
        return (0,) * int(original.dim())
    start, _ = held.locate_item_in_global_item(held.param_idx[original])
    row = math.prod(original.shape[1:])  # its storage may be released, so it is not indexed
    return (start // row, *([0] * (original.dim() - 1)))


def held(wrapped: Any) -> Iterator[tuple[BufferRole, str, torch.Tensor]]:
    """(role, parameter, local shard) of model weights as stored between steps, main weights and gradients; shared tensors are listed once."""
    buffer = wrapped.param_and_grad_buffer
    for group in buffer.parameter_groups:
        for index, parameter in enumerate(group.params):
            name = bare_name(buffer.param_to_name[parameter])
            buffers: tuple[tuple[BufferRole, Any], ...] = (
                ("params", group.model_weight_buffer),
                ("main_params", group.main_weight_buffer),
                ("grads", group.main_grad_buffer),
            )
            if group.model_weight_buffer is None:  # no_shard leaves the weights where the model has them
                yield "params", name, parameter.detach()
            for role, flat in buffers:
                if flat is not None:
                    yield role, name, flat.get_item(index, only_shard=flat.is_data_distributed)


def resting(wrapped: Any) -> dict[str, torch.Tensor]:
    """Parameter -> what this rank updates of the weights that the model reads: the shard that its main weights have, also where the weights themselves are whole."""
    buffer: Any = getattr(wrapped, "param_and_grad_buffer", None)
    found: dict[str, torch.Tensor] = {}
    for group in getattr(buffer, "parameter_groups", ()):
        weights, mains = group.model_weight_buffer, group.main_weight_buffer
        for index, parameter in enumerate(group.params if mains is not None else ()):
            # no_shard has no buffer of weights
            part = parameter if weights is None else weights.get_item(index, only_shard=mains.is_data_distributed)
            found[bare_name(buffer.param_to_name[parameter])] = part.detach().reshape(-1)
    return found


def indexed_device(cuda: bool) -> AbstractContextManager[None]:
    """The wrapper builds 'cuda:<current device>' from a number, but the CPU layer's current device is not a number. It also warns that a CPU is not such a device."""
    if cuda:
        return nullcontext()
    log = logging.getLogger("megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp")
    return replaced((log, "disabled", True), (torch.cuda, "current_device", lambda: 0))
