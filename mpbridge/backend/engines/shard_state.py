"""Local shards in the form of megatron-core's checkpoints and the audit: sharded tensors by global name, main weights and moments in FP32."""

import contextlib
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mpbridge.backend.engines.contract import Live
from mpbridge.backend.engines.optimizers import follow
from mpbridge.backend.engines.shard_optimizer import ShardOptimizer
from mpbridge.common.facts import ADAMS, OPTIMIZERS, STATE_ROLES
from mpbridge.numerics.optimizers import join, split

_GROUP_FACTS = ("max_lr", "min_lr", "wd_mult", "lr_mult")
"""The rates that a schedule may take up, and what tells groups apart."""


def live_shards(model: Any, optimizer: ShardOptimizer) -> Iterator[Live]:
    """This rank's part of the parameters, gradients, buffers, main weights and moments that exist at this moment."""
    for name, parameter in optimizer.names.items():
        yield Live(role="params", parameter=name, tensor=parameter._local_tensor.detach())
        if parameter.grad is not None:
            yield Live(role="grads", parameter=name, tensor=parameter.grad._local_tensor)
    yield from live_states(optimizer)
    for name, buffer in model.named_buffers():
        yield Live(role="buffers", parameter=name, tensor=buffer)


def live_states(optimizer: ShardOptimizer) -> Iterator[Live]:
    """Moments, and the main weights that FusedAdam holds."""
    for name in optimizer.names:
        state = optimizer.state_of(name)
        for key, role in STATE_ROLES.items():
            if isinstance(state.get(key), torch.Tensor):
                yield Live(role=role, parameter=name, tensor=state[key])


def _sharded(key: str, local: torch.Tensor, optimizer: ShardOptimizer, name: str) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    parameter = optimizer.names[name]
    return ShardedTensor(
        key=key,
        data=local,
        dtype=local.dtype,
        local_shape=tuple(local.shape),
        global_shape=tuple(parameter.shape),
        global_offset=optimizer.offset(name, parameter),
        axis_fragmentations=None,  # rows that do not divide evenly among ranks form an irregular grid
        replica_id=0,
    )


def parameter_state(optimizer: ShardOptimizer) -> dict[str, Any]:
    """Name -> this rank's part of the parameter as stored; frozen parameters too."""
    return {
        name: _sharded(name, p._local_tensor.detach(), optimizer, name)
        for name, p in optimizer.names.items()
        if p._local_tensor.numel()
    }


def main_weights(optimizer: ShardOptimizer, name: str) -> torch.Tensor:
    """This rank's part of the trained weights, in FP32: remainders joined, scaled main weights unscaled."""
    shard, state = optimizer.shards[name], optimizer.state_of(name)
    stored = state.get("master_param")
    if stored is None or shard.dtype is torch.float32:
        return shard.detach().float()
    if stored.dtype is torch.int16:
        return join(shard.detach(), stored)
    wide: torch.Tensor = optimizer.part_of(name).get_unscaled_state(shard, "master_param")
    return wide.float()


def optimizer_state(optimizer: ShardOptimizer, *, loading: bool = False) -> dict[str, Any]:
    """{'main', 'exp_avg', ...: name -> FP32 part; 'groups', 'step', 'scaler'}; zeros for moments that do not exist yet."""
    keys = ("main", *(key for part in optimizer.parts for key in OPTIMIZERS[optimizer.kind(part)]))
    state: dict[str, Any] = {key: {} for key in keys}
    for name, shard in optimizer.shards.items():
        values = {"main": main_weights(optimizer, name)}
        for key in OPTIMIZERS[optimizer.kind(optimizer.part_of(name))]:
            values[key] = torch.zeros_like(shard, dtype=torch.float32) if loading else _moment(optimizer, name, key)
        for key, value in values.items():
            state[key][name] = _sharded(f"optimizer.{key}.{name}", value.view(shard.shape), optimizer, name)
    groups, scaler = optimizer.param_groups, optimizer.grad_scaler
    scaled = {} if scaler is None else scaler.state_dict()
    return state | {
        "step": _step(optimizer),
        "groups": [{fact: group[fact] for fact in _GROUP_FACTS if fact in group} for group in groups],
        "scaler": {key: float(v) if isinstance(v, torch.Tensor) else v for key, v in scaled.items()},
    }


def _moment(optimizer: ShardOptimizer, name: str, key: str) -> torch.Tensor:
    shard, part = optimizer.shards[name], optimizer.part_of(name)
    stored: torch.Tensor | None = optimizer.state_of(name).get(key)
    if stored is None:
        return torch.zeros_like(shard, dtype=torch.float32)
    if hasattr(part, "get_unscaled_state"):
        stored = part.get_unscaled_state(shard, key)
    wide: torch.Tensor = stored.detach().float()
    return wide


def _step(optimizer: ShardOptimizer) -> int:
    """Updates applied so far: FusedAdam counts per group, torch per parameter."""
    for group in optimizer.param_groups:
        if "step" in group and group["params"]:
            return int(group["step"])
    for name in optimizer.shards:
        step = optimizer.state_of(name).get("step")
        if step is not None:
            return int(step)
    return 0


@torch.no_grad()
def load_parameters(optimizer: ShardOptimizer, state: Mapping[str, torch.Tensor]) -> None:
    """Copies weights of any dtype in; existing main weights are set equal to them."""
    for name, parameter in optimizer.names.items():
        if parameter._local_tensor.numel():
            parameter._local_tensor.copy_(state[name])
    for name, shard in optimizer.shards.items():
        follow(optimizer.part_of(name), shard, optimizer.state_of(name).get("master_param"))


@torch.no_grad()
def load_optimizer(optimizer: ShardOptimizer, state: Mapping[str, Any]) -> None:
    """Loads the result of `optimizer_state`, even from a recipe that stores states differently: main weights and moments are rounded to this recipe's."""
    step = int(state["step"])
    for name, shard in optimizer.shards.items():
        part = optimizer.part_of(name)
        kind = optimizer.kind(part)
        counts = kind in ADAMS
        if step or not counts:
            _load_moments(part, shard, {key: state[key][name] for key in OPTIMIZERS[kind]}, step if counts else None)
        _load_main(part, shard, state["main"][name])
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(saved)
        if step and hasattr(optimizer.parts[-1], "set_scaled_state"):
            group["step"] = step
    if optimizer.grad_scaler is not None and state["scaler"]:
        scale = torch.tensor([state["scaler"]["scale"]], dtype=torch.float32)
        optimizer.grad_scaler.load_state_dict({**state["scaler"], "scale": scale})


def _load_moments(part: Any, shard: torch.nn.Parameter, moments: Mapping[str, torch.Tensor], step: int | None) -> None:
    """step: of an optimizer that counts them."""
    if hasattr(part, "set_scaled_state"):
        if not part.state[shard]:
            part.initialize_state(shard, part.store_param_remainders)
        for key, value in moments.items():
            part.set_scaled_state(shard, key, value.float())
        return
    own = {key: value.to(shard.dtype) for key, value in moments.items()}
    # torch keeps the step count in FP32 on the CPU, regardless of the parameter
    part.state[shard] = own if step is None else {"step": torch.tensor(float(step)), **own}


def _load_main(part: Any, shard: torch.nn.Parameter, main: torch.Tensor) -> None:
    stored = part.state[shard].get("master_param") if shard in part.state else None
    if stored is not None and stored.dtype is torch.int16:
        split(main.float().contiguous(), shard.detach(), stored)
        return
    shard.copy_(main)
    if stored is not None:
        part.set_scaled_state(shard, "master_param", main.float())


def forget_shardings() -> None:
    """Clears torch's caches of how DTensors are sharded and sent: they keep the meshes, and so the process groups, of closed engines alive."""
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    for owner, clear in (
        (debug, "_clear_sharding_prop_cache"),
        (_redistribute, "clear_redistribute_planner_cache"),
        (_redistribute, "_gen_transform_infos.cache_clear"),
        (_collective_utils, "MeshTopoInfo.build_from_mesh.cache_clear"),
    ):
        with contextlib.suppress(AttributeError):  # releases lack some of them
            operator.attrgetter(clear)(owner)()
