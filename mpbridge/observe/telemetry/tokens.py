"""Whether a step's tokens resemble those before: if the loss jumps on ordinary tokens, the data is not the cause."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch

FEWEST, RECENT = 6, 20
"""Steps before the first judgement, and the number of earlier steps with which a step is compared."""
LEAST = 0.5
"""Nats per token: a smaller difference from the usual value is never reported."""


class Tokens:
    """Counts the tokens that reach this rank's embedding, and scores each step's tokens by how often they occurred before.

    The score is the nats per token under the counts so far, plus one each: about the entropy of single tokens if nothing changes, and at least the
    logarithm of the vocabulary size for tokens that never occurred. A rank without an embedding sees none.
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._now: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.on = False
        """Whether the current forward pass belongs to a training step."""

    def attach(self, chunks: list[Any]) -> None:
        """Hooks the embeddings of these model chunks, and releases those hooked before."""
        self.close()
        for chunk in chunks:
            for name, module in chunk.named_modules():
                if name.endswith("word_embeddings"):
                    self._hooks.append(module.register_forward_pre_hook(self._look))

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _look(self, module: Any, args: Any) -> None:
        if not self.on or not args or not isinstance(args[0], torch.Tensor) or args[0].is_floating_point():
            return
        tokens = args[0].detach().reshape(-1)
        if self._now is None:
            # ids are at most as large as the vocabulary of all tensor-parallel ranks
            size = int(getattr(module, "num_embeddings", 0)) or int(tokens.max()) + 1
            self._now = torch.zeros(size, device=tokens.device, dtype=torch.float32)
            self._seen = torch.zeros_like(self._now)
        self._now.index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.float32))

    def step(self) -> tuple[float, float | None] | None:
        """(nats per token of the step that ended, the usual value if this one differs from it); None if no token was seen.

        Unusual tokens are not added to the counts, so that more of the same kind are unusual too.
        """
        if self._now is None or self._seen is None:
            return None
        now, self._now = self._now, torch.zeros_like(self._now)
        share = (self._seen + 1) / (self._seen.sum() + len(self._seen))
        nats = float((now * -share.log()).sum() / now.sum().clamp(min=1))
        before = sorted(self._recent)
        usual = before[len(before) // 2] if before else math.nan
        spread = sorted(abs(one - usual) for one in before)[len(before) // 2] if before else 0.0
        if len(before) >= FEWEST and nats > usual + max(LEAST, 12 * spread):
            return nats, usual
        self._recent.append(nats)
        self._seen += now
        return nats, None
