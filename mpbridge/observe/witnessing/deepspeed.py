"""What DeepSpeed's ZeRO optimizers have in common: `engine.step()`, flat FP32 partitions, gradients that are freed within the step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mpbridge.backend.engines.contract import Live
from mpbridge.observe.audit.holdings import Held
from mpbridge.observe.witnessing.core import after_call, before_call
from mpbridge.observe.witnessing.loops import Update
from mpbridge.observe.witnessing.plain import TorchLoop, states


class DeepSpeedLoop(TorchLoop):
    """DeepSpeed's engine around a module, stepped through `engine.step()`."""

    def __init__(
        self, model: Any, optimizer: Any, flat: list[torch.Tensor], *, scaler: Any = None, group: Any = None
    ) -> None:
        """flat: the FP32 partitions that this rank updates."""
        self._flat = flat
        self._samples: dict[str, dict[int, float]] = {}
        self._grads: dict[str, tuple[int, torch.dtype]] = {}
        self._read: dict[str, tuple[int, torch.dtype]] = {}
        super().__init__(model, optimizer, scaler=scaler, group=group)

    @property
    def wrapper(self) -> str:
        """What reduces gradients."""
        return f"DeepSpeed {type(self.outer).__name__}"

    @property
    def loss_scale(self) -> float:
        """DeepSpeed's own loss scale."""
        return float(getattr(self.outer, "loss_scale", 1.0) or 1.0)

    def tensors(self) -> Iterator[Live]:
        """The live tensors as DeepSpeed has them; gradients, which it frees within its step, as they were during it."""
        for held in self.audit_holdings():
            yield Live(role="params", parameter=held.name, tensor=self._stored(held))
            for role, seen in (("grads", self._grads), ("main_grads", self._read)):
                if held.name in seen:
                    count, dtype = seen[held.name]
                    yield Live(role=role, parameter=held.name, tensor=torch.empty(count, dtype=dtype, device="meta"))
            if held.main is not None:
                yield Live(role="main_params", parameter=held.name, tensor=held.main)
            yield from states(held)
        yield from self._buffers()

    def on_update(self, then: Callable[[Update], None]) -> Callable[[], None]:
        """Hooks in after DeepSpeed's own `step`; gradients are recorded before it, and inside it when the inner optimizer reads them."""

        def stepped(result: Any) -> None:
            norm = getattr(self.outer, "_global_grad_norm", None)
            then(Update(applied=not getattr(self.outer, "overflow", False), norm=None if norm is None else float(norm)))

        self._samples, self._grads, self._read = {}, {}, {}
        handles = [inner.register_step_post_hook(self._reading) for inner in self.inner]
        undo = [before_call(self.outer, "step", self._accumulated), after_call(self.outer, "step", stepped)]

        def off() -> None:
            for handle in handles:
                handle.remove()
            for one in reversed(undo):
                one()

        return off

    @abstractmethod
    def _stored(self, held: Held) -> torch.Tensor:
        """This rank's part of a parameter between steps."""

    @abstractmethod
    def _accumulated(self) -> None:
        """Records the accumulated gradients before the step begins."""

    @abstractmethod
    def _reading(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Records the gradients that the inner optimizer reads while it steps."""

    def _note(self, name: str, mine: torch.Tensor) -> None:
        """Records a gradient that the inner optimizer reads; if it has the accumulator's dtype, it is the accumulator."""
        if name in self._grads and self._grads[name][1] is not mine.dtype:
            self._read[name] = int(mine.numel()), mine.dtype
