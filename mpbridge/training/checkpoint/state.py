"""A run's state as stored in a checkpoint, independent of the recipe: main weights and moments in FP32 under one name, regardless of their owner.

megatron-core's optimizers store the same things under different names and shapes: FP32Optimizer updates the parameters themselves,
Float16OptimizerWithFloat16Params calls main weights `fp32_param`, DistributedOptimizer `param`, and FusedAdam with remainders keeps the lower 16
bits only. Here the tensors that an engine requests are looked up under the checkpoint's names, and remainders are joined and split again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mpbridge.backend.engines.optimizers import CpuFusedAdam
from mpbridge.backend.megatron.inside_optimizer import parts
from mpbridge.common.errors import CheckpointError
from mpbridge.common.facts import STATE_ROLES
from mpbridge.numerics.optimizers import join, split
from mpbridge.training.checkpoint.format import Index

Path = tuple[Any, ...]
"""Keys and indices that lead to a place in nested dicts and lists."""
MAIN = ("optimizer.state.param.", "optimizer.state.fp32_param.")
"""Prefixes of main weights: the distributed optimizer's, the other one's."""
MOMENTS = {f"optimizer.state.{key}.": role for key, role in STATE_ROLES.items() if role != "main_params"}
_GROUP_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""Keys that identify parameter groups (megatron-core's param_group_identifier_keys)."""
_OWN_KEYS = ("betas", "eps", "shampoo_beta")
"""Keys by which groups of different optimizers are told apart: Adam has the first two, SOAP all, Lion the first, Muon none."""


def prime(optimizer: Any) -> None:
    """Creates every parameter's optimizer state, as the first update would: a run whose steps were all skipped has none yet."""
    for part in parts(optimizer):
        if not hasattr(part, "init_state_fn"):
            continue
        if part.init_state_fn is None and isinstance(part.optimizer, torch.optim.SGD):
            part.init_state_fn = _momenta  # megatron-core has none for SGD, and calls it on loading
        if part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)


def _momenta(optimizer: Any, config: Any = None) -> None:
    for group in optimizer.param_groups:
        for param in group["params"] if group["momentum"] else ():
            optimizer.state[param].setdefault("momentum_buffer", torch.zeros_like(param))


def walk(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, leaf) of the ShardedTensors, factories and objects anywhere in nested dicts and lists."""
    if isinstance(tree, Mapping):
        for name, item in tree.items():
            yield from walk(item, (*path, name))
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            yield from walk(item, (*path, index))
    elif hasattr(tree, "key") and hasattr(tree, "replica_id"):
        yield path, tree


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves found by `walk`."""
    for _, leaf in walk(tree):
        yield leaf


def is_model_key(key: str) -> bool:
    """Whether a key names a tensor of the model."""
    return not key.startswith(("optimizer.", "emulation.", "rng"))


def stored_dtypes(state: Mapping[str, Any]) -> dict[str, str]:
    """Role -> torch's name of its tensors' dtype in `state` (several joined by '+')."""
    found: dict[str, set[str]] = {}
    for leaf in leaves(state):
        dtype = getattr(leaf, "dtype", None) or getattr(leaf.data, "dtype", None)
        if isinstance(dtype, torch.dtype):
            found.setdefault(_role(leaf.key), set()).add(str(dtype).removeprefix("torch."))
    return {role: "+".join(sorted(dtypes)) for role, dtypes in sorted(found.items())}


def _role(key: str) -> str:
    if key.startswith(MAIN):
        return "main_params"
    other = "params" if is_model_key(key) else key.partition(".")[0]
    return next((role for prefix, role in MOMENTS.items() if key.startswith(prefix)), other)


def parts_of(optimizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """State dicts of the single optimizers in a chained one."""
    if "param_groups" in optimizer or "optimizer" in optimizer:
        return [dict(optimizer)]
    return [dict(optimizer[name]) for name in sorted(optimizer, key=str) if isinstance(optimizer[name], Mapping)]


def join_remainders(state: Mapping[str, Any], optimizer: Any) -> None:
    """Replaces 16-bit remainders in an engine's state by the FP32 main weights that they form with the parameters."""
    for (_, model), (_, main) in _remainders(state, optimizer):
        # megatron-core gathers them as FP32 numbers, and its own loading then refuses them (expected int16)
        _put(main, join(model.data.detach(), main.data.reshape(model.data.shape).to(torch.int16)))


def ask_for_whole(state: Mapping[str, Any], optimizer: Any) -> list[tuple[Path, Path]]:
    """Makes an engine's loading state request FP32 main weights in place of remainders; returns (path of the parameter, of the main weight)."""
    pairs = []
    for (model_path, _), (main_path, main) in _remainders(state, optimizer):
        _put(main, torch.empty_like(main.data, dtype=torch.float32))
        pairs.append((model_path, main_path))
    return pairs


def split_remainders(loaded: dict[str, Any], pairs: list[tuple[Path, Path]]) -> None:
    """Reverts `ask_for_whole` in a loaded state: main weights become remainders, and the parameters their upper halves."""
    for model_path, main_path in pairs:
        whole = at(loaded, main_path[:-1])[main_path[-1]].float().contiguous()
        high = torch.empty(whole.shape, dtype=torch.bfloat16)
        low = torch.empty(whole.shape, dtype=torch.int16)
        split(whole, high, low)
        at(loaded, main_path[:-1])[main_path[-1]] = low
        at(loaded, model_path[:-1])[model_path[-1]] = high


def at(tree: Any, path: Path) -> Any:
    """The part of nested dicts and lists that `path` leads to."""
    for step in path:
        tree = tree[step]
    return tree


def _put(leaf: Any, tensor: torch.Tensor) -> None:
    leaf.data = tensor
    if hasattr(leaf, "dtype"):  # a factory has none
        leaf.dtype = tensor.dtype


def _remainders(state: Mapping[str, Any], optimizer: Any) -> Iterator[tuple[tuple[Path, Any], tuple[Path, Any]]]:
    if not any(map(_hands_out_halves, parts(optimizer))):
        return
    model = walk({name: part for name, part in state.items() if name.startswith("model")})
    models = {_place(leaf, leaf.key): (path, leaf) for path, leaf in model}
    for path, leaf in walk({"optimizer": state.get("optimizer")}):
        if leaf.key.startswith(MAIN) and models[_place(leaf, _bare(leaf.key))][1].data.dtype is torch.bfloat16:
            yield models[_place(leaf, _bare(leaf.key))], (path, leaf)


def _hands_out_halves(part: Any) -> bool:
    """Whether an optimizer stores main weights as bare remainders: Transformer Engine's does, mpbridge's stores them whole."""
    inner = getattr(part, "optimizer", None)
    return bool(getattr(inner, "store_param_remainders", False)) and not isinstance(inner, CpuFusedAdam)


def _place(leaf: Any, key: str) -> tuple[Any, ...]:
    """What is the same for a parameter and its main weight: layers share a key and differ in the offset, or in what builds a factory's tensors."""
    return key, getattr(leaf, "global_offset", None), id(getattr(leaf, "build_fn", None))


def _bare(key: str) -> str:
    return next((key.removeprefix(prefix) for prefix in MAIN if key.startswith(prefix)), key)


class Shelf:
    """A checkpoint's contents, under whose names an engine's state is requested."""

    def __init__(self, index: Index) -> None:
        self.tensors = index.tensors
        self.divided = {key.rpartition(".")[0]: stored for key, stored in index.tensors.items()}
        """Tensors that are stored in named parts, by their own key: a Mamba projection's are KEY.z, KEY.x ..."""

    def main(self, model_key: str) -> str | None:
        """The key of a parameter's main weights; None if the parameter is its own main weight."""
        return next((prefix + model_key for prefix in MAIN if self._dtype(prefix + model_key) is not None), None)

    def _dtype(self, key: str) -> torch.dtype | None:
        stored = self.tensors.get(key) or self.divided.get(key)
        return None if stored is None else getattr(torch, stored.dtype)

    def holds(self, part: Any) -> bool:
        """Whether every tensor that `part` of an engine's state requests exists with the requested shape."""
        wanted = ((self.tensors.get(leaf.key), tuple(leaf.global_shape)) for leaf in leaves(part))
        return all(stored is not None and stored.shape == shape for stored, shape in wanted)

    def point(self, state: Mapping[str, Any]) -> None:
        """Renames the tensors that `state` requests to the checkpoint's names.

        Parameters with another dtype than the stored one are read from the main weights and cast once, as the optimizer would.
        """
        for leaf in leaves(state):
            if leaf.key.startswith(MAIN):
                leaf.key = self.main(_bare(leaf.key)) or _bare(leaf.key)
            elif is_model_key(leaf.key):
                wanted, main = _dtype_of(leaf), self.main(leaf.key)
                if main is not None and wanted is not self._dtype(leaf.key):
                    leaf.key = main


def _dtype_of(leaf: Any) -> torch.dtype | None:
    dtype = getattr(leaf, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else getattr(leaf.data, "dtype", None)


def check_numbers(saved: Any, file: str, name: str = "") -> None:
    """Raises CheckpointError naming the place if a schedule, a parameter group or a loss scaler has an impossible number.

    Rates, decays, scales and counts are finite and not negative.
    """
    items = (
        saved.items() if isinstance(saved, Mapping) else enumerate(saved) if isinstance(saved, (list, tuple)) else ()
    )
    for key, item in items:
        check_numbers(item, file, f"{name}.{key}" if name else str(key))
    numbers = saved.tolist() if isinstance(saved, torch.Tensor) and saved.numel() < 16 else saved
    least = -LARGEST_NUMBER if name.endswith("hysteresis_tracker") else 0  # megatron-core decrements it without bound
    for number in numbers if isinstance(numbers, list) and isinstance(saved, torch.Tensor) else [numbers]:
        if isinstance(number, (int, float)) and not least <= number <= LARGEST_NUMBER:
            raise CheckpointError(f"{file}: {name}={str(number)[:40]}, expected a number from 0 to {LARGEST_NUMBER:g}")


LARGEST_NUMBER = 2.0**127
"""Larger than any rate, count or loss scale; NaN and infinity are rejected too."""


def take_rates(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Gives the optimizer's groups the checkpoint's highest and lowest rates, by which megatron-core tells groups apart since 0.19."""
    groups = saved.get("groups") or [group for part in parts_of(saved) for group in _groups(part)]
    for group in optimizer.param_groups:
        group |= _group(group, groups, ("max_lr", "min_lr"))


def optimizer_state(loaded: Mapping[str, Any], fresh: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The value that `Engine.load_state` expects under 'optimizer'.

    loaded: the tensors, in the shape of `fresh`, the new engine's own state; saved: the checkpoint's plain part (groups, loss scaler). What is set in
    groups is the run's.
    """
    if "groups" in fresh:  # the FSDP engines' form, which is the same for every recipe
        mine = {"groups": fresh["groups"]}
        return {name: value for name, value in saved.items() if name in fresh} | dict(loaded) | mine
    olds = parts_of(saved)
    groups = [group for part in olds for group in _groups(part)]
    scaler = next((part["grad_scaler"] for part in olds if "grad_scaler" in part), None)
    # torch's own optimizers count their steps in each parameter's state, which megatron-core stores once
    states = [part.get("state") or (part.get("optimizer") or {}).get("state") or {} for part in olds]
    steps = {
        _kind(_groups(part)): {"common_step": state["common_step"]}
        for part, state in zip(olds, states, strict=True)
        if "common_step" in state
    }
    single = len(parts_of(fresh)) == 1 and parts_of(fresh)[0].keys() == fresh.keys()
    if single:
        return _part(dict(loaded), fresh, groups, scaler, steps)
    return {
        name: _part(dict(loaded.get(name, {})), part, groups, scaler, steps)
        for name, part in fresh.items()
        if isinstance(part, Mapping)
    }


def _part(
    loaded: dict[str, Any],
    fresh: Mapping[str, Any],
    groups: list[dict[str, Any]],
    scaler: Any,
    steps: Mapping[tuple[bool, ...], dict[str, Any]],
) -> dict[str, Any]:
    merged = [_group(group, groups, ("step",)) for group in _groups(fresh)]
    step = steps.get(_kind(merged), {})
    if "param_groups" in fresh:  # FP32Optimizer: torch's own shape
        return {"state": loaded.get("state", {}) | step, "param_groups": merged}
    inner = dict(fresh["optimizer"]) | {"param_groups": merged}
    if "state" in inner:
        inner["state"] = loaded.get("optimizer", {}).get("state", {}) | step
    whole = {name: value for name, value in fresh.items() if name not in ("optimizer", "grad_scaler")} | loaded
    whole["optimizer"] = inner
    if "grad_scaler" in fresh:
        whole["grad_scaler"] = fresh["grad_scaler"] if scaler is None else scaler
    return whole


def _groups(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = part.get("param_groups") or (part.get("optimizer") or {}).get("param_groups") or []
    return [dict(group) for group in found]


def _kind(groups: list[dict[str, Any]]) -> tuple[bool, ...]:
    """What tells the groups of one optimizer from those of another."""
    return tuple(any(key in group for group in groups) for key in _OWN_KEYS)


def _group(fresh: dict[str, Any], saved: list[dict[str, Any]], kept: tuple[str, ...]) -> dict[str, Any]:
    """The fresh group, with what is `kept` of the saved one with the same identifying keys; else of another, as all count the same steps."""
    marks = [key for key in _GROUP_KEYS if key in fresh]
    alike = [group for group in saved if _kind([group]) == _kind([fresh])] or saved
    match = next((group for group in alike if all(group.get(key, fresh[key]) == fresh[key] for key in marks)), None)
    if match is None:
        match, kept = (alike or [{}])[0], ("step",)
    # (megatron-core wraps them, so that they stay out of the files)
    params: Any = fresh.get("params")
    own = {"params": params.unwrap() if hasattr(params, "unwrap") else params} if "params" in fresh else {}
    return fresh | {name: value for name, value in match.items() if name in kept} | own


def random_states() -> dict[str, Any]:
    """This rank's states: torch, megatron-core's tracker, Python, NumPy, CUDA where there is one."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    numbers: Any = np.random.get_state()
    kind, words, *rest = numbers
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "tracker": dict(get_cuda_rng_tracker().get_states()),
        "python": random.getstate(),
        "numpy": (kind, words.tolist(), *rest),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_states(states: Mapping[str, Any]) -> None:
    """Sets what `random_states` read. Raises what torch, NumPy and Python raise for anything else."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.set_rng_state(states["cpu"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(states["numpy"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])


def random_entry(states: dict[str, Any]) -> Any:
    """The states as an entry of a sharded state dict."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)
