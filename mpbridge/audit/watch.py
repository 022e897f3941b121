"""What linears, autocast and collectives did while steps ran: light hooks that are taken off after the live audit."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch

from mpbridge.audit.stored import storage
from mpbridge.audit.wire import Seen, observed

_LINEARS = frozenset(
    {"ColumnParallelLinear", "RowParallelLinear", "Linear", "LayerNormLinear", "GroupedLinear", "LayerNormMLP"}
)
"""Class names of matrix products: megatron-core's, torch's and Transformer Engine's."""


def is_linear(module: Any) -> bool:
    """Whether the module is a matrix product with weights (by the names in its class tree; Transformer Engine need not be there)."""
    return any(base.__name__ in _LINEARS for base in type(module).__mro__)


def linears(chunks: list[Any]) -> dict[str, Any]:
    """Global path -> linear, over this rank's model chunks; layer numbers are counted over the whole model."""
    found: dict[str, Any] = {}
    for chunk in chunks:
        numbers: dict[str, int] = {}
        for path, module in chunk.named_modules():
            number = getattr(module, "layer_number", None)
            head, _, last = path.rpartition(".")
            if isinstance(number, int) and head.endswith("layers") and last.isdigit():
                numbers[path] = number - 1  # megatron-core counts from 1, over all pipeline stages
            if is_linear(module):
                found[_global(path, numbers)] = module
    return found


def _global(path: str, numbers: dict[str, int]) -> str:
    short = path
    while short.startswith("module."):  # Float16Module, DistributedDataParallel ... each add one
        short = short.removeprefix("module.")
    for layer, number in numbers.items():
        if path.startswith(f"{layer}."):
            head = layer.rpartition(".")[0]
            tail = path.removeprefix(f"{layer}.")
            while head.startswith("module."):
                head = head.removeprefix("module.")
            return f"{head}.{number}.{tail}"
    return short


def _autocast(device: str) -> str:
    if not torch.is_autocast_enabled(device):
        return "off"
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


class Watch:
    """Observes an engine's steps between `start` and `stop`; the counters stay readable after."""

    def __init__(self) -> None:
        self.outputs: dict[str, Counter[str]] = {}
        """Linear -> dtype of what it returned -> calls."""
        self.weights: dict[str, str] = {}
        """Linear -> storage of the weight that its last forward read."""
        self.autocast: Counter[str] = Counter()
        self.wire: Seen = Counter()
        self._undo: ExitStack | None = None

    def start(self, chunks: list[Any]) -> None:
        """Installs the hooks; a second start does nothing."""
        if self._undo is not None:
            return
        with ExitStack() as undo:
            for path, module in linears(chunks).items():
                undo.callback(module.register_forward_hook(self._hook(path)).remove)
            undo.enter_context(observed(self.wire))
            self._undo = undo.pop_all()

    def stop(self) -> None:
        """Takes every hook off."""
        if self._undo is not None:
            self._undo.close()
            self._undo = None

    def _hook(self, path: str) -> Any:
        counts = self.outputs.setdefault(path, Counter())

        def look(module: Any, inputs: Any, output: Any) -> None:
            result = output[0] if isinstance(output, tuple) else output
            if isinstance(result, torch.Tensor):
                counts[storage(result)] += 1
                self.autocast[_autocast(result.device.type)] += 1
            weight = getattr(module, "weight", None)
            if isinstance(weight, torch.Tensor):
                self.weights[path] = storage(weight)

        return look
