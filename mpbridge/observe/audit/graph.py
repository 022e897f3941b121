"""Which module a node of the autograd graph belongs to, so that backward operations can be reported by module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


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
