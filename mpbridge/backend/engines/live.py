"""Which live tensors of a megatron-core model and optimizer play which role."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mpbridge.backend.engines.contract import Live
from mpbridge.backend.megatron.inside_optimizer import main_weights, parts
from mpbridge.backend.models.gpt import global_names
from mpbridge.common.facts import STATE_ROLES


def bare(chunk: Any) -> Any:
    """The GPTModel inside its wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of a bare model by global name."""
    names = global_names(model)
    for name, parameter in model.named_parameters():
        yield names[name], parameter


def live(chunks: list[Any], optimizer: Any) -> list[Live]:
    """Every tensor that exists at this moment: parameters, buffers, gradients with their buffers' padding, main weights, main gradients, moments."""
    names: dict[torch.Tensor, str] = {}
    found = []
    for chunk in chunks:
        model = bare(chunk)
        for name, parameter in parameters(model):
            names[parameter] = name
            found.append(Live(role="params", parameter=name, tensor=parameter.detach()))
            grad = getattr(parameter, "main_grad", None)
            if grad is not None:
                found.append(Live(role="grads", parameter=name, tensor=grad))
        full = global_names(model)
        found += [Live(role="buffers", parameter=full[name], tensor=buffer) for name, buffer in model.named_buffers()]
        found += _padding(chunk)
    for part in parts(optimizer):
        found += _optimizer_tensors(part, names)
    return found


def _padding(chunk: Any) -> Iterator[Live]:
    """The elements of the distributed optimizer's buffers that belong to no parameter: alignment between parameters and at the end."""
    for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
        ranges = sorted(index[:2] for index in buffer.param_index_map.values())
        for data in (buffer.grad_data, buffer.param_data):
            if data is None:
                continue
            ends = [0, *(end for _, end in ranges)]
            starts = [*(start for start, _ in ranges), data.numel()]
            yield from (
                Live(role="padding", parameter="", tensor=data[a:b]) for a, b in zip(ends, starts, strict=True) if a < b
            )


def _optimizer_tensors(part: Any, names: dict[torch.Tensor, str]) -> Iterable[Live]:
    for parameter, updated in main_weights(part):
        name = names[parameter]
        if updated is not parameter and not _one_storage(updated, parameter):
            yield Live(role="main_params", parameter=name, tensor=updated.detach())
        for attribute in ("decoupled_grad", "grad"):
            grad = getattr(updated, attribute, None)
            if grad is not None:
                yield Live(role="main_grads", parameter=name, tensor=grad)
        state = part.optimizer.state.get(updated, {})
        for key, role in STATE_ROLES.items():
            if isinstance(state.get(key), torch.Tensor):
                # Transformer Engine's FP8 moments report FP32 as their dtype; their codes are what is stored
                yield Live(role=role, parameter=name, tensor=getattr(state[key], "_data", state[key]))


def _one_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether one is a view of the other, or two quantized weights (wrappers without storage) share the storage of their codes."""
    codes = [getattr(tensor, "_data", None) if hasattr(tensor, "_scale_inv") else tensor for tensor in (first, second)]
    plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in codes)
    return plain and codes[0].untyped_storage().data_ptr() == codes[1].untyped_storage().data_ptr()  # type: ignore[union-attr]


def follow_main_weights(chunks: list[Any], optimizer: Any) -> None:
    """Rounds the loaded main weights into the parameters: a checkpoint of the other realization has weights at rest rounded by another rule.

    Where FusedAdam owns the main weights, or parameters are their own, megatron-core's copy does nothing."""
    from mpbridge.backend.megatron.inside_optimizer import gather_now

    for part in parts(optimizer):
        copy = getattr(part, "_copy_main_params_to_model_params", None)
        if copy is not None:
            copy()
    for chunk in chunks:
        if getattr(getattr(chunk, "ddp_config", None), "use_distributed_optimizer", False):
            gather_now([chunk])


def forget_main_weights(optimizer: Any) -> None:
    """Makes FusedAdam's own main weights follow the parameters again; megatron-core's `reload_model_params` does not update them."""
    for part in parts(optimizer):
        inner = part.optimizer
        if not getattr(inner, "master_weights", False):
            continue
        for parameter, state in inner.state.items():
            if "master_param" not in state:
                continue
            if state["master_param"].dtype is torch.int16:
                # a parameter that was just loaded equals its main weight: the remainder is zero
                state["master_param"].zero_()
            else:
                inner.set_scaled_state(parameter, "master_param", parameter.detach().float())


def allocate_moments(optimizer: Any) -> None:
    """Gives parameters that were never updated zero moments: a checkpoint without them could not be loaded (for example, if all steps so far overflowed)."""
    for part in parts(optimizer):
        if part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)
