"""One rank of a world: builds every scenario, takes a step, and compares live tensors with predicted roles. Differences come back as text.

Run by `differences` below; `python live_roles.py OUT NAME,NAME` under torchrun's environment."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.worlds import reported

SEQ, VOCAB = 32, 96
GPT2 = {"share_embeddings_and_output_weights": True, "add_bias_linear": True}
LLAMA = {
    "share_embeddings_and_output_weights": False, "add_bias_linear": False, "normalization": "RMSNorm", "gated_linear_unit": True, "num_query_groups": 2,
    "position_embedding_type": "rope", "ffn_hidden_size": 104, "qk_layernorm": True,
}  # fmt: skip
YARN = {
    "position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 24,
}  # fmt: skip
LLAMA_TIED = LLAMA | YARN | {"share_embeddings_and_output_weights": True, "add_qkv_bias": True, "qk_layernorm": False}
MOE = {
    "share_embeddings_and_output_weights": False, "add_bias_linear": False, "num_moe_experts": 4, "moe_ffn_hidden_size": 40, "moe_layer_freq": [0, 1],
    "moe_token_dispatcher_type": "alltoall", "moe_shared_expert_intermediate_size": 24, "moe_router_load_balancing_type": "none",
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
}  # fmt: skip
HYBRID = {
    "share_embeddings_and_output_weights": False, "add_bias_linear": False, "normalization": "RMSNorm", "num_query_groups": 2, "ffn_hidden_size": 104,
    "position_embedding_type": "none", "num_layers": 4, "hybrid_override_pattern": "M*-M", "mamba_num_heads": 12, "mamba_head_dim": 8, "mamba_num_groups": 2,
    "mamba_state_dim": 10,
}  # fmt: skip
MIXED = HYBRID | {name: MOE[name] for name in MOE if name != "moe_layer_freq"} | {"hybrid_override_pattern": "ME*E"}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2, "gpt2_untied": GPT2 | {"share_embeddings_and_output_weights": False}, "llama": LLAMA, "llama_tied": LLAMA_TIED,
    "moe": MOE, "hybrid": HYBRID, "hybrid_moe": MIXED, "lora": LLAMA | {"lora_rank": 3},
}  # fmt: skip
SHARDED = {"use_distributed_optimizer": True}
OVERLAP = SHARDED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {}, "sharded": {"ddp": SHARDED}, "buckets": {"ddp": OVERLAP | {"bucket_size": 9000}},
    "bus": {"ddp": SHARDED | {"pad_buckets_for_high_nccl_busbw": True}},
    "tp": {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}, "ddp": SHARDED},
    "pp": {"parallel": {"pipeline_model_parallel_size": 2}, "ddp": SHARDED},
    "pp_ddp": {"parallel": {"pipeline_model_parallel_size": 2}},
    "ep": {"parallel": {"expert_model_parallel_size": 2}, "ddp": SHARDED}, "unclipped": {"optimizer": {"clip_grad": 0.0}},
    "sgd": {"optimizer": {"optimizer": "sgd"}},
}  # fmt: skip
RECIPES: dict[str, Any] = {
    "fp32": "fp32", "bf16": "bf16_mixed", "fp16": "fp16_mixed",
    "bf16_grads": {"recipe": "bf16_mixed", "grad_reduce_in_fp32": False}, "moments": "bf16_mixed_bf16_moments",
    "remainders": {"recipe": "bf16_mixed", "use_precision_aware_optimizer": True, "grad_reduce_in_fp32": False},
    "no_remainders": {"recipe": "bf16_mixed", "use_precision_aware_optimizer": True, "store_param_remainders": False, "exp_avg_dtype": "fp8"},
    "kept": {"recipe": "bf16_mixed", "keep_fp32": ["*layernorm*"]},
    "mamba_kept": {"recipe": "bf16_mixed", "keep_fp32": ["*.A_log", "*.D", "*.dt_bias"]}, "full": "full_bf16",
    "frozen": {"recipe": "bf16_mixed", "frozen": ["*"]},
    "frozen_wide": {"recipe": "bf16_mixed", "frozen": ["*"], "lora_dtype": "fp32"},
    "frozen_layer": {"recipe": "bf16_mixed", "frozen": ["decoder.layers.0.*", "*norm*"]},
}  # fmt: skip


def differences(size: int, cases: list[str], folder: Path, *, timeout: float = 840.0) -> dict[str, Any]:
    """For each 'shape/layout/recipe' what every rank reports."""
    found: dict[str, Any] = reported(size, __file__, folder / f"roles{size}.json", ",".join(cases), timeout=timeout)
    return found


def resolved(case: str, *, world: int) -> Any:
    from mpbridge.common.machines import machine
    from mpbridge.settings.container import ConfigContainer

    shape, layout, recipe = case.split("/")
    extra = LAYOUTS[layout]
    model = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": VOCAB, "max_sequence_length": SEQ,
        "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    train = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 4}
    sections = {"ddp": {}, "parallel": {}} | extra | {"optimizer": {"lr": 1e-3} | extra.get("optimizer", {})}
    container = ConfigContainer(mixed_precision=RECIPES[recipe], model=model | SHAPES[shape], train=train, **sections)
    return container.resolved(world_size=world, machine=machine("cpu"))


def _compare(case: str) -> dict[str, Any]:
    import torch
    from megatron.core import parallel_state

    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.mcore import McoreEngine
    from mpbridge.backend.engines.optimizers import CpuFusedAdam
    from mpbridge.planning.memory.roles import roles

    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    run = resolved(case, world=world)
    with device_layer(False, fused_adam=CpuFusedAdam):
        engine = McoreEngine.build(run)
        size = parallel_state.get_data_parallel_world_size()
        steps = range(40 if "fp16" in case else 1)
        applied = [engine.train_step(batches(), microbatches=2 // size).applied for _ in steps]
        live = list(engine.tensors())
        want = roles(run.policy, run.facts, rank=rank)
        differ = _differ(_counted(live), _predicted(want))
        held = [t.tensor.untyped_storage() for t in live if t.role != "buffers"]
        live_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())
        engine.close()
    said = {"bytes": sum(role.bytes for role in want if role.name != "buffers"), "live_bytes": live_bytes}
    return {"applied": any(applied), "differ": differ, "roles": sorted({role.name for role in want}), **said}


def batches(length: int = SEQ) -> Iterator[dict[str, Any]]:
    """Two samples that count."""
    import torch

    text, positions = torch.arange(length + 1).expand(2, length + 1) % VOCAB, torch.arange(length).expand(2, length)
    while True:
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        yield {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": torch.ones(2, length)}


def _counted(live: list[Any]) -> Counter[Any]:
    """(role, parameter, dtype) -> elements, views of other roles' memory left out, padding summed."""
    grads = {t.tensor.untyped_storage().data_ptr() for t in live if t.role == "grads"}
    found: Counter[Any] = Counter()
    for t in live:
        alias = t.role == "main_grads" and t.tensor.untyped_storage().data_ptr() in grads
        if not alias:
            found[t.role, t.parameter, str(t.tensor.dtype).removeprefix("torch.")] += t.tensor.numel()
    return found


def _predicted(want: Any) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for role in want:
        found[role.name, role.parameter, role.dtype.value] += role.elements + role.padding
    return found


def _differ(seen: Counter[Any], want: Counter[Any]) -> list[str]:
    keys = [key for key in sorted(set(seen) | set(want)) if seen[key] != want[key]]
    return [f"{key}: live {seen[key]}, predicted {want[key]}" for key in keys]


def main() -> None:
    import torch

    from mpbridge.backend.engines.parallel import start_process_group, stop_process_group

    out, cases = Path(sys.argv[1]), sys.argv[2].split(",")
    start_process_group(False, timeout_minutes=2)
    torch.set_num_threads(1)
    found = {case: _compare(case) for case in cases}
    reports: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reports, found)
    if torch.distributed.get_rank() == 0:
        out.write_text(json.dumps({case: [report[case] for report in reports] for case in cases}))
    stop_process_group()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        print(f"rank {os.environ.get('RANK')}:\n{traceback.format_exc()}", flush=True)
        os._exit(1)
