"""Bugs that need two ranks, in torch's own loop; rank 0 writes {play: what the witness says} to the file named first."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mpbridge
from tests.observe.witnessing.loops import Tiny, adam, loss_of, tokens


def averaged(model: Any) -> None:
    for one in model.parameters():
        dist.all_reduce(one.grad)
        one.grad /= dist.get_world_size()


def stepped(reduced_after: int | None) -> str:
    """One step of three micro-batches; the all-reduce comes after that many of them. The ranks then train different models."""
    model = Tiny()
    optimizer = adam(model)
    with mpbridge.witness(model, optimizer) as seen:
        for number in range(3):
            (loss_of(model, tokens(10 * number + dist.get_rank()), autocast=False) / 3).backward()
            if number + 1 == reduced_after:
                averaged(model)
        optimizer.step()
    mine = model.head.weight.detach()
    other = mine.clone()
    dist.broadcast(other, 0)
    differs = torch.tensor(float(not torch.equal(mine, other)))
    dist.all_reduce(differs)
    assert bool(differs) is (reduced_after != 3)
    return "\n".join(str(fault) for fault in seen.report.report.faults)


def main() -> None:
    dist.init_process_group("gloo")
    found = {"healthy": stepped(3), "last micro-batch": stepped(2), "never reduced": stepped(None)}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
