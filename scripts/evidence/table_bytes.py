"""Bytes per parameter, predicted and live, for every row that a CPU can run, with one and two processes; prints a Markdown table.

`python scripts/evidence/table_bytes.py [--processes 1,2] [--json FILE]`: trains two steps of a small GPT for each row and adds up the engine's live tensors
(parameters, gradients, main weights and gradients, moments; without alignment and buffers) next to the prediction of `mpbridge memory`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

SHARDED: dict[str, Any] = {"ddp": {"use_distributed_optimizer": True}}
EMULATED = SHARDED | {"emulate": True}
LOW = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
AWARE = {"recipe": "bf16_mixed", "use_precision_aware_optimizer": True}
ROWS: tuple[tuple[str, str, Any, dict[str, Any], str], ...] = (
    # what, engine, mixed_precision, sections, bytes per parameter over N data-parallel ranks
    ("fp32, DDP", "mcore", "fp32", {}, "16"),
    ("fp32, distributed optimizer", "mcore", "fp32", SHARDED, "8 + 8/N"),
    ("bf16_mixed, DDP", "mcore", "bf16_mixed", {}, "18"),
    ("bf16_mixed, distributed optimizer", "mcore", "bf16_mixed", SHARDED, "6 + 12/N"),
    ("bf16 gradients, DDP", "mcore", {"recipe": "bf16_mixed", "grad_reduce_in_fp32": False}, {}, "20"),
    ("bf16 gradients, distributed optimizer", "mcore", {"recipe": "bf16_mixed", "grad_reduce_in_fp32": False}, SHARDED, "4 + 16/N"),
    ("precision-aware, remainders", "mcore", AWARE, SHARDED, "6 + 10/N"),
    ("precision-aware, whole main weights", "mcore", AWARE | {"store_param_remainders": False}, SHARDED, "6 + 12/N"),
    ("bf16_mixed_bf16_moments", "mcore", "bf16_mixed_bf16_moments", SHARDED, "6 + 6/N"),
    ("the same with bf16 gradients", "mcore",
     {"recipe": "bf16_mixed_bf16_moments", "grad_reduce_in_fp32": False, "main_grads_dtype": "bf16"}, SHARDED, "4 + 6/N"),
    ("fp8 moments", "mcore", AWARE | {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}, SHARDED, "6 + 4/N"),
    ("emulated tensorwise FP8, precision-aware, bf16 moments", "mcore",
     {"recipe": "bf16_with_fp8_current_scaling_mixed", "first_last_layers_bf16": False, "use_precision_aware_optimizer": True} | LOW, EMULATED, "6 + 8/N"),
    ("full_bf16, DDP", "mcore", "full_bf16", {}, "8"),
    ("fp32_params_bf16_compute (pattern B)", "fsdp2", "fp32_params_bf16_compute", {}, "16/N"),
    ("the same with bf16 moments (FusedAdam)", "fsdp2", {"recipe": "fp32_params_bf16_compute", "use_precision_aware_optimizer": True} | LOW, {}, "12/N"),
    ("bf16_params_fp32_states (pattern A)", "fsdp2", "bf16_params_fp32_states", {}, "14/N"),
    ("bf16_mixed on FSDP2", "fsdp2", "bf16_mixed", {}, "16/N"),
    ("full_bf16 on FSDP2 (the risky pattern)", "fsdp2", "full_bf16", {}, "8/N"),
    ("bf16_megatron_fsdp", "megatron_fsdp", "bf16_megatron_fsdp", {}, "18/N"),
    ("the same with bf16 moments", "megatron_fsdp", {"recipe": "bf16_megatron_fsdp"} | LOW, {}, "14/N"),
    ("bf16_megatron_fsdp with bf16 gradients", "megatron_fsdp", {"recipe": "bf16_megatron_fsdp", "grad_reduce_in_fp32": False}, {}, "20/N"),
)  # fmt: skip
ROLES = ("params", "grads", "main_params", "main_grads", "exp_avg", "exp_avg_sq")
MODEL = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128, "max_sequence_length": 32, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "add_bias_linear": False, "position_embedding_type": "rope", "share_embeddings_and_output_weights": False,
}  # fmt: skip


def formula(text: str, ranks: int) -> float:
    """The value of '6 + 12/N' for N ranks."""
    total = 0.0
    for term in text.split("+"):
        number, _, by = term.strip().partition("/")
        total += float(number) / (ranks if by else 1)
    return total


def _batches(rank: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(rank)
    while True:
        text = torch.randint(0, 128, (2, 33), generator=generator)
        yield {
            "tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous(),
            "position_ids": torch.arange(32).expand(2, 32), "loss_mask": torch.ones(2, 32),
        }  # fmt: skip


def _live(engine: Any) -> float:
    """Bytes of this rank's roles; a tensor with two roles counts once."""
    from mpbridge.numerics.observation.tensors import local, size

    tensors = [live for live in engine.tensors() if live.role in ROLES]
    buffers = {local(live.tensor).untyped_storage().data_ptr() for live in tensors if live.role == "grads"}
    return float(
        sum(
            size(t.tensor)
            for t in tensors
            if t.role != "main_grads" or local(t.tensor).untyped_storage().data_ptr() not in buffers
        )
    )


def resolved(row: tuple[str, str, Any, dict[str, Any], str], ranks: int) -> Any:
    """The run of a row in a world of that size."""
    from mpbridge.settings.container import ConfigContainer

    _, engine_name, recipe, sections, _ = row
    container = ConfigContainer(
        mixed_precision=recipe, engine=engine_name, model=MODEL, optimizer={"lr": 1e-3}, ddp=sections.get("ddp", {}), emulate=sections.get("emulate", False),
        train={"micro_batch_size": 2, "global_batch_size": 2 * ranks, "train_iters": 2},
    )  # fmt: skip
    return container.resolved(world_size=ranks)


def predicted(run: Any, rank: int) -> int:
    """Bytes of a rank's roles, as `mpbridge memory` predicts them."""
    from mpbridge.planning.memory.by_role import memory

    held = memory(run.policy, run.facts, rank=rank).roles
    return sum(held.get(role, 0) for role in ROLES)


def _row(row: tuple[str, str, Any, dict[str, Any], str]) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from mpbridge.backend.engines.registry import build_engine

    ranks, rank = dist.get_world_size(), dist.get_rank()
    run = resolved(row, ranks)
    engine = build_engine(run)
    data = _batches(rank)
    for _ in range(2):
        engine.train_step(data, microbatches=1)
    parameters = sum(parameter.numel() for _, parameter in engine.named_parameters())
    found = torch.tensor([_live(engine), float(predicted(run, rank))], dtype=torch.float64)
    engine.close()
    dist.all_reduce(found)
    live, expected = (float(value) / (ranks * parameters) for value in found)
    return {"live": live, "predicted": expected}


def measure(out: Path) -> None:
    """One rank: all rows; rank 0 writes them."""
    import torch.distributed as dist

    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.optimizers import CpuFusedAdam
    from mpbridge.backend.engines.parallel import start_process_group, stop_process_group

    start_process_group(False)
    with device_layer(False, fused_adam=CpuFusedAdam):
        rows = [_row(row) for row in ROWS]
    if dist.get_rank() == 0:
        out.write_text(json.dumps(rows))
    stop_process_group()


def measured(processes: int, folder: Path) -> list[dict[str, float]]:
    """The rows measured with that many processes."""
    out = folder / f"bytes{processes}.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        __file__,
        "--rank-out",
        str(out),
    ]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=580, check=False
    )
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-6000:])
    return json.loads(out.read_text())


def table(counts: list[int]) -> tuple[str, dict[int, list[dict[str, float]]]]:
    """The Markdown table, and its numbers."""
    with tempfile.TemporaryDirectory() as folder:
        found = {count: measured(count, Path(folder)) for count in counts}
    lines = [
        "| what | engine | bytes per parameter | " + " | ".join(f"N={c}: rule, predicted, live" for c in counts) + " |"
    ]
    lines.append("|---|---|---|" + "---|" * len(counts))
    for index, (what, engine, _, _, rule) in enumerate(ROWS):
        cells = [
            f"{formula(rule, c):g}, {found[c][index]['predicted']:.4g}, {found[c][index]['live']:.4g}" for c in counts
        ]
        lines.append(f"| {what} | {engine} | {rule} | " + " | ".join(cells) + " |")
    return "\n".join(lines), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_out:
        measure(args.rank_out)
        return
    text, found = table([int(count) for count in args.processes.split(",")])
    print(text)
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
