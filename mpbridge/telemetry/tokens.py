"""Whether the tokens of a step are like those before them: a loss that jumps on ordinary tokens is not the data's."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch

FEWEST, RECENT = 6, 20
"""Steps before the first judgement, and how many a step is compared with."""
LEAST = 0.5
"""Nats a token: what lies below is never called unlike."""


class Tokens:
    """Counts the tokens that the embedding of this rank is given, and prices each step's by how often each was seen before.

    The price is nats a token under the counts so far, one added to each: about the entropy of single tokens where nothing changes, and up to the
    logarithm of the vocabulary for tokens that were never seen. A rank without an embedding sees none.
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._now: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.on = False
        """Whether what passes now belongs to a step in training."""

    def attach(self, chunks: list[Any]) -> None:
        """Listens to the embedding of these models in place of the ones before."""
        self.close()
        for chunk in chunks:
            for name, module in chunk.named_modules():
                if name.endswith("word_embeddings"):
                    self._hooks.append(module.register_forward_pre_hook(self._look))

    def close(self) -> None:
        """Listens to nothing."""
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
        """(nats a token of the step that ended, the usual ones where it is unlike them); None where no token was seen.

        Tokens that are unlike are not counted among those seen: the next of their kind are unlike too.
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
