"""Measures the overhead of mpbridge's loop: throughput of `pretrain` with everything on, compared with a bare megatron-core loop with the same configs.

    python scripts/evidence/bench_overhead.py [--config FILE] [--recipe NAME] [--rounds N] [key=value ...]

Arms: ours (metrics, TensorBoard, progress, audit, hooks), bare (megatron-core's schedule, optimizer and scheduler in ten lines, the same
modules), bare again (the A/A ratio). All three train their own copy of the model on the same text.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from arms import Turns, bench, ratio, report
from bare import BareLoop

from mpbridge.training.base import Training


def text(training: Training) -> Iterator[dict[str, torch.Tensor]]:
    """The same text as ours, through torch's DataLoader."""
    train = training.run.train
    dataset = training.feed.corpus.dataset("train", int(train["global_batch_size"]) * int(train["train_iters"]))
    while True:
        yield from torch.utils.data.DataLoader(dataset, batch_size=int(train["micro_batch_size"]))


def main() -> None:
    """Runs the benchmark and prints the ratios."""
    turns = Turns(
        lambda training: {
            name: BareLoop(training.run, text(training), cuda=False).step for name in ("bare", "bare again")
        }
    )
    seconds = bench(__doc__, turns)
    ratios = {
        "ours / bare (throughput; at least 0.98)": ratio(seconds, "bare", "ours"),
        "bare again / bare (A/A)": ratio(seconds, "bare", "bare again"),
    }
    report("overhead of mpbridge's loop", turns, ratios)


if __name__ == "__main__":
    main()
