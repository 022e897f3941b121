"""A run that is over leaves no thread behind: a process may hold many runs, one after the other."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.training.loop import pretrain
from tests.training.tiny import tiny_run

TASKS = Path("/proc/self/task")


def gloo() -> int:
    """Threads of gloo's process groups: a loop and two workers each."""
    return sum("gloo" in (task / "comm").read_text() for task in TASKS.iterdir())


EXPERTS = {
    "num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_aux_loss_coeff": 0.01,
    "add_bias_linear": False,
}  # fmt: skip


ROPE = {"position_embedding_type": "rope"}
SHARDED = {"use_distributed_optimizer": True}
RUNS: dict[str, dict[str, Any]] = {
    "experts": {"model": {**ROPE, **EXPERTS}},
    "fp32, distributed optimizer": {"recipe": "fp32", "ddp": SHARDED},
    "fsdp2": {"recipe": "fp32_params_bf16_compute", "engine": "fsdp2"},
    "megatron-fsdp": {"recipe": "bf16_megatron_fsdp", "engine": "megatron_fsdp"},
}


@pytest.mark.filterwarnings("ignore:moe_ffn_hidden_size is not set")
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.skipif(not TASKS.exists(), reason="counts threads in Linux's /proc")
def test_a_run_leaves_no_thread_of_its_process_groups_behind(tmp_path: Path, kind: str) -> None:
    if kind in ("fsdp2", "megatron-fsdp") and torch.__version__.startswith("2.11."):
        pytest.skip(
            "torch 2.11's cache of sharding decisions keeps device meshes, and these their groups, for the whole process"
        )
    before = gloo()
    pretrain(tiny_run(tmp_path, **RUNS[kind], train={"train_iters": 1, "eval_interval": None}), quiet=True)
    gc.collect()
    assert gloo() <= before  # threads of earlier tests may end meanwhile


@pytest.mark.filterwarnings("ignore:moe_ffn_hidden_size is not set")
def test_a_deeper_model_with_experts_follows_a_shallow_one(tmp_path: Path) -> None:
    for layers in (1, 3):
        folder = tmp_path / str(layers)
        folder.mkdir()
        model = {**EXPERTS, "num_layers": layers}
        pretrain(tiny_run(folder, model=model, train={"train_iters": 1, "eval_interval": None}), quiet=True)
