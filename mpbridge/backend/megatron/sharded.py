"""Reads and rebuilds megatron-core's description of a sharded state: which part of which global tensor each leaf is. Performs no file I/O.

The classes are those of megatron.core.dist_checkpointing.mapping (0.16.1 to 0.20); its strategies, planners and serializers are not used.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

_LEAF = object()


def _is(leaf: Any, kind: str) -> bool:
    from megatron.core.dist_checkpointing import mapping

    return isinstance(leaf, getattr(mapping, kind))


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf is a ShardedTensor."""
    return _is(leaf, "ShardedTensor")


def is_object(leaf: Any) -> bool:
    """Whether a leaf is a ShardedObject."""
    return _is(leaf, "ShardedObject")


def _is_factory(leaf: Any) -> bool:
    return _is(leaf, "ShardedTensorFactory")


def is_written_here(leaf: Any) -> bool:
    """Whether this rank's copy of a leaf is the one that is written."""
    replica = leaf.replica_id
    return replica == 0 if isinstance(replica, int) else all(part == 0 for part in replica)


def wide(leaf: Any) -> Any:
    """A leaf's tensor, dequantized if it is stored in 8 bits with scales: a checkpoint holds values."""
    from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor

    return dequantize_fp8_tensor(leaf.data) if is_float8tensor(leaf.data) else leaf.data


def _built(factory: Any) -> Any:
    """A factory's parts. They are split after dequantization: Transformer Engine 2.11 fails to split an MXFP8 tensor, as a gated MLP's factory does."""
    whole = copy.copy(factory)
    whole.data = wide(factory)
    return whole.build()


def entries(tree: Any) -> Iterator[Any]:
    """Every ShardedTensor and ShardedObject in a state, with factories built."""
    if _is_factory(tree):
        yield from entries(_built(tree))
    elif isinstance(tree, (dict, list)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from entries(item)
    elif is_tensor(tree) or is_object(tree):
        yield tree


def layer_by_layer(tree: Any) -> Any:
    """The state with every tensor that is stacked over layers under a key of its own: where some layers have none (they are frozen), the stack has gaps."""

    def leaf(item: Any) -> Any:
        if not _is_factory(item):
            return replace(_unstacked(item), key=_of_layer(item.key, item)) if _is_stacked(item) else item
        made, build = copy.copy(item), item.build_fn
        first = next(entries(item), None)
        if _is_stacked(first):
            made.key = _of_layer(item.key, first)
            made.build_fn = lambda *given: _kept(build(*given), _unstacked)
        return made

    return _kept(tree, leaf)


def _is_stacked(leaf: Any) -> bool:
    return is_tensor(leaf) and ".layers." in leaf.key and leaf.prepend_axis_num > 0


def _of_layer(key: str, leaf: Any) -> str:
    return key.replace(".layers.", f".layers.{leaf.global_offset[0]}.", 1)


def _unstacked(leaf: Any) -> Any:
    """A ShardedTensor without the axis of layers."""
    axes = {name: getattr(leaf, name)[1:] for name in ("global_shape", "global_offset", "axis_fragmentations")}
    return replace(leaf, prepend_axis_num=leaf.prepend_axis_num - 1, **axes)


def common(tree: Any) -> Any:
    """The parts of a state that are neither sharded nor local: plain data, equal on all ranks. Containers that become empty are dropped."""
    local = "LocalNonpersistentObject"
    found = _kept(tree, lambda leaf: _LEAF if _is(leaf, local) or hasattr(leaf, "replica_id") else leaf)
    return {} if found is _LEAF else found


def filled(tree: Any, read: Callable[[Any], Any]) -> Any:
    """The state with what `read` returns for each ShardedTensor and ShardedObject; factories are merged, local parts unwrapped, the rest dropped."""

    def leaf(item: Any) -> Any:
        if _is_factory(item):
            return item.merge_fn(_kept(_built(item), leaf))
        if _is(item, "LocalNonpersistentObject"):
            return item.unwrap()
        return read(item) if is_tensor(item) or is_object(item) else _LEAF

    found = _kept(tree, leaf)
    return {} if found is _LEAF else found


def _kept(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """`tree` with `leaf` applied to its leaves; those returned as _LEAF, and containers that become empty, are dropped."""
    if isinstance(tree, dict):
        made = {name: new for name, item in tree.items() if (new := _kept(item, leaf)) is not _LEAF}
        return made if made or not tree else _LEAF
    if isinstance(tree, list):
        items = [new for item in tree if (new := _kept(item, leaf)) is not _LEAF]
        return items if items or not tree else _LEAF
    return leaf(tree)
