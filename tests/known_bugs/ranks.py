"""Bugs that need two ranks, in torch's own loop; rank 0 writes {play: what the witness says} to the file named first."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mpbridge
from mpbridge.common.versions import release
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


GONE = release(torch.__version__) >= release("2.15")
MENDED = "this torch no longer has the bug"


class Block(torch.nn.Module):
    """A norm whose weights every tensor-parallel rank has, and two linears that are split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.up, self.down = torch.nn.Linear(32, 64, bias=False), torch.nn.Linear(64, 32, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(functional.gelu(self.up(self.norm(hidden))))
        return out


def over_tensor_parallel_ranks(compute: torch.dtype) -> str:
    """fully_shard under tensor parallelism: the real bug, in the installed torch."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = Block()
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}  # fmt: skip
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32))
    optimizer = adam(model)
    mine = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1)).chunk(2, dim=1)[dist.get_rank()]
    with mpbridge.witness(model, optimizer) as seen:
        model(mine.contiguous()).float().pow(2).mean().backward()
        norm = model.norm.weight.grad.full_tensor()
        # summed in FP32, a gradient has bits that BF16 lacks
        assert torch.equal(norm, norm.bfloat16().float()) is (compute is torch.bfloat16 and not GONE)
        optimizer.step()
    if compute is torch.bfloat16 and GONE:
        return MENDED
    return "\n".join(str(fault) for fault in seen.report.report.faults)


def main() -> None:
    dist.init_process_group("gloo")
    found = {"healthy": stepped(3), "last micro-batch": stepped(2), "never reduced": stepped(None)}
    found |= {"tensor parallel": over_tensor_parallel_ranks(torch.bfloat16)}
    found["healthy"] += over_tensor_parallel_ranks(torch.float32)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
