"""The modules of a rank's model: their global paths and kinds, the tensors that they pass on, and which of them a node of the autograd graph belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_LINEARS = {"ColumnParallelLinear", "RowParallelLinear", "Linear", "LayerNormLinear", "GroupedLinear", "LayerNormMLP"}
"""Class names of linear layers: megatron-core's, torch's and Transformer Engine's."""

_KERNELS = ("transformer_engine", "apex", "megatron.core.fusions.fused_layer_norm")


def _is(module: Any, names: set[str]) -> bool:
    return any(base.__name__ in names for base in type(module).__mro__)


def is_linear(module: Any) -> bool:
    """Whether the module is a linear layer (by class names in its MRO, so that Transformer Engine need not be installed)."""
    return _is(module, _LINEARS)


def is_layer(module: Any) -> bool:
    """Whether the module is a whole transformer or Mamba layer."""
    return _is(module, {"BaseTransformerLayer", "TransformerLayer", "MambaLayer"})


def is_norm(module: Any) -> bool:
    """Whether the module is a norm and nothing else."""
    name = type(module).__name__
    return ("LayerNorm" in name or "RMSNorm" in name or "L2Norm" in name) and not is_linear(module)


def is_router(module: Any) -> bool:
    """Whether the module is a router."""
    return type(module).__name__.endswith("Router")


def is_attention(module: Any) -> bool:
    """Whether the module is core attention: scores, softmax and the product with the values."""
    return type(module).__name__.endswith(("DotProductAttention", "CausalAttention"))


def is_scan(module: Any) -> bool:
    """Whether the module is a Mamba layer's mixer, in which the scan runs."""
    return type(module).__name__ == "MambaMixer"


def is_adapter(module: Any) -> bool:
    """Whether the module is a low-rank adapter (backend.models.adapters), whose last step multiplies by its scale."""
    return type(module).__name__ == "Adapter" and hasattr(module, "linear_out")


def is_library(module: Any) -> bool:
    """Whether the module computes in another library, bypassing torch's dispatcher: Transformer Engine, or Apex in megatron-core's fused norm."""
    return any(base.__module__.startswith(_KERNELS) for base in type(module).__mro__)


def is_rotary(module: Any) -> bool:
    """Whether the module computes rotary angles."""
    return "RotaryEmbedding" in type(module).__name__


def module_paths(chunks: list[Any]) -> dict[Any, str]:
    """Module -> global path, over this rank's model chunks, in module order, without wrappers' 'module.'."""
    found: dict[Any, str] = {}
    for chunk in chunks:
        numbers: dict[str, int] = {}
        for path, module in chunk.named_modules():
            number = getattr(module, "layer_number", None)
            head, _, last = path.rpartition(".")
            if isinstance(number, int) and head.endswith("layers") and last.isdigit():
                numbers[path] = number - 1  # megatron-core numbers from 1, over all pipeline stages
            found[module] = _global(path, numbers)
    return found


def linears(chunks: list[Any]) -> dict[str, Any]:
    """Global path -> linear, over this rank's model chunks."""
    return {path: module for module, path in module_paths(chunks).items() if is_linear(module)}


_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"})
"""Attributes in which FSDP1, torch.compile, activation checkpointing and Lightning's Fabric store the wrapped module."""


def bare(path: str) -> str:
    """A path, or a parameter's name, as in the unwrapped model."""
    if not _WRAPPERS.isdisjoint(parts := path.split(".")):
        path = ".".join(part for part in parts if part not in _WRAPPERS)
    while path == "module" or path.startswith("module."):
        path = path.removeprefix("module").removeprefix(".")
    return path


def _global(path: str, numbers: dict[str, int]) -> str:
    # the outermost layer on the path has its global number
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        layer = ".".join(parts[:end])
        if layer in numbers:
            return ".".join(filter(None, [bare(".".join(parts[: end - 1])), str(numbers[layer]), *parts[end:]]))
    return bare(path)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a module's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


class Graph:
    """Nodes of one step's graph and their modules. Nodes are kept alive until `forget`, since they are identified by address."""

    def __init__(self) -> None:
        self._owner: dict[Any, str] = {}

    def add(self, path: str, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> list[Any]:
        """Assigns to `path` the nodes between `inputs` and `outputs` that no submodule has claimed, and returns them."""
        edge = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}
        waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
        taken = []
        while waiting:
            node = waiting.pop()
            if node is None or node in edge or node in self._owner:
                continue
            self._owner[node] = path
            taken.append(node)
            waiting += [before for before, _ in node.next_functions if before is not None]
        return taken

    def owner(self) -> str | None:
        """The module whose node is running now; None outside of backward and for nodes without a module."""
        node = torch._C._current_autograd_node()
        return None if node is None else self._owner.get(node)

    def forget(self) -> None:
        """Releases the graph."""
        self._owner.clear()


def hooked(paths: Mapping[Any, str], enters: Callable[[Any, str, Any], None], leaves: Callable[..., None]) -> ExitStack:
    """Calls `enters` (module, path, arguments) and `leaves` (module, path, arguments, result) around each forward pass of these modules, until closed.

    Hooks of the whole process: modules keep their own lists of hooks, which the audit compares. `enters` runs before a module's own hooks, `leaves` before
    its own forward hooks; one dictionary look-up per call of any module.
    """

    def before(module: Any, args: Any) -> None:
        if (path := paths.get(module)) is not None:
            enters(module, path, args)

    def after(module: Any, args: Any, output: Any) -> None:
        if (path := paths.get(module)) is not None:
            leaves(module, path, args, output)

    with ExitStack() as undo:
        undo.callback(register_module_forward_pre_hook(before).remove)
        undo.callback(register_module_forward_hook(after).remove)
        return undo.pop_all()


def floating(value: Any) -> torch.Tensor | None:
    """The first floating-point tensor in a module's arguments or results."""
    return next((tensor for tensor in tensors_in(value) if tensor.is_floating_point()), None)
