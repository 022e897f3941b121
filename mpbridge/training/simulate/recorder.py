"""Records matrix products and collectives, and answers collectives itself: torch has no meta kernels for coalesced ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = {
    "_allgather_base_": "all_gather", "allgather_": "all_gather", "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_": "reduce_scatter", "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "alltoall_base_": "all_to_all", "alltoall_": "all_to_all",
    "send": "send", "recv_": "receive", "broadcast_": "broadcast",
}  # fmt: skip
_SENT_SECOND = ("all_gather", "reduce_scatter", "all_to_all")
"""Their first argument is the output."""

Wire = tuple[str, int, str, int]
"""(kind, ranks of the group, dtype, input bytes)."""
MatmulShape = tuple[int, int, int, str]
"""(smaller and larger outer size, inner size, dtype)."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active: `wires` and `products` count what is issued."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wires: Counter[Wire] = Counter()
        self.products: Counter[MatmulShape] = Counter()

    def clear(self) -> None:
        """Clears the records."""
        self.wires.clear()
        self.products.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs or answers one operation."""
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs or {})
        if func._schema.name in ("aten::mm", "aten::addmm"):
            a, b = [one for one in args if isinstance(one, torch.Tensor)][-2:]
            m, k, n = a.shape[0], a.shape[1], b.shape[1]
            self.products[min(m, n), max(m, n), k, _name(a)] += 1
        return func(*args, **(kwargs or {}))

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [one for one in pytree.tree_leaves(args) if isinstance(one, torch.Tensor)]
        if any(one.device.type != "meta" for one in tensors):
            return func(*args, **kwargs)  # objects; a fake group returns this rank's own
        group = next((a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())), None)
        ranks = ProcessGroup.unbox(group).size() if group is not None else 0
        kind = _KINDS.get(func._schema.name[6:], func._schema.name[6:])
        sent = args[1] if kind in _SENT_SECOND else args[0]
        for one in pytree.tree_leaves(sent):
            if isinstance(one, torch.Tensor):
                self.wires[kind, ranks, _name(one), one.numel() * one.element_size()] += 1
        work = FakeWork().boxed()
        return (args[0], work) if len(func._schema.returns) == 2 else work


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "uint8", "int64": "int64"}


def _name(tensor: torch.Tensor) -> str:
    long = str(tensor.dtype).removeprefix("torch.")
    return _SHORT.get(long, long)
