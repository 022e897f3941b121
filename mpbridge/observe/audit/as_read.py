"""The weights that a forward pass reads, compared with their main weights before an update refreshes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from mpbridge.observe.audit.weights import Weights, standing


class AsRead:
    """Compares once, at the end of the first forward pass through every model chunk of this rank: a parameter gather that overlaps with it is complete by then.

    then: called with what was found. aside: a context in which operations are not recorded as part of the step.
    """

    def __init__(
        self,
        engine: Any,
        then: Callable[[Weights], None] = lambda seen: None,
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.seen: Weights | None = None
        """None until the forward pass has run."""
        self._engine, self._then, self._aside = engine, then, aside
        self._handles = {
            number: chunk.register_forward_hook(partial(self._ran, number)) for number, chunk in enumerate(engine.model)
        }

    def _ran(self, number: int, module: Any, args: Any, output: Any) -> None:
        handle = self._handles.pop(number, None)
        if handle is None:
            return
        handle.remove()
        # under a transform of torch.func (vmap, grad) parameters have no values that could be read
        if not self._handles and torch._C._functorch.peek_interpreter_stack() is None:
            with self._aside(), torch.no_grad():
                self.seen = standing(self._engine)
            self._then(self.seen)

    def stop(self) -> None:
        """Removes the hooks that did not run."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
