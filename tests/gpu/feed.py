"""Random micro-batches for an engine."""

from collections.abc import Iterator
from itertools import repeat

import torch


def batches(run) -> Iterator[dict[str, torch.Tensor]]:
    """One micro-batch, again and again: tokens of the byte tokenizer's range."""
    size = (run.facts.micro_batch_size, run.facts.shape.seq_length + 1)
    ids = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(size[1] - 1)[None].expand(size[0], -1)
    mask = torch.ones(size[0], size[1] - 1)
    yield from repeat({"tokens": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions, "loss_mask": mask})
