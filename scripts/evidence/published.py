"""Published runs as mpbridge Runs, built in the same way as a user's configuration. Shared by the scripts that fit and check predictions."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that it runs in a checkout without installation

from mpbridge.common.machines import machine
from mpbridge.planning.capability import ASSUMED
from mpbridge.settings.container import ConfigContainer, Run

RECIPES = {
    "BF16": "bf16_mixed", "FP8": "bf16_with_fp8_current_scaling_mixed", "MXFP8": "bf16_with_mxfp8_mixed", "NVFP4": "bf16_with_nvfp4_mixed",
}  # fmt: skip
UNUSUAL = ("gpt_oss_120b",)
"""Models with kernels that the fitted rows do not have; predicted separately."""
CORES = {
    "25.09": "0.15.0", "25.11": "0.16.0rc0", "26.02": "0.16.0", "26.02.01": "0.16.1", "26.04": "0.17.0rc0", "26.04.01": "0.17.0rc0",
    "26.06": "0.18.0", "26.06.01": "0.18.2", "26.08": "0.19.0",
}  # fmt: skip
"""Release -> its megatron-core: package_info.py of the commit that Megatron Bridge's tag names (25.09: an older one than 0.16)."""
FITTED = ("25.11", "26.02", "26.02.01", "26.04", "26.04.01")
"""Releases with fitted rows; those before and after are for the errors of releases that were not fitted."""
CANNOT = ("nemotron_3_nano",)
"""Hybrids with state-space layers: not priced."""
WRONG = {(62, "26.02.01"), (64, "26.02.01")}
"""Rows with a wrong layout in the published table: their states would not fit."""

# DeepSeek-V3's and Kimi K2's placement of layers on stages, as in Megatron Bridge's recipes: (pipeline, virtual) -> layout
_LAYOUTS = {
    (2, 8): "Et*4|(tttt|)*14t{tail}", (4, 4): "Et*4|(tttt|)*14t{tail}", (8, 2): "Et*4|(tttt|)*14t{tail}", (16, 1): "Et*4|(tttt|)*14t{tail}",
    (4, 2): "Et*8|(tttttttt|)*6t*5{tail}", (2, 4): "Et*8|(tttttttt|)*6t*5{tail}", (8, 4): "Et*2|(tt|)*29t|{tail}", (8, 1): "Et*8|(tttttttt|)*6t*5{tail}", (4, 1): "Et*16|(t*16|)*2t*13{tail}", (2, 1): "Et*31|t*30{tail}",
}  # fmt: skip
_KIMI = [
    "model.num_attention_heads=64", "model.num_moe_experts=384", f"model.moe_layer_freq={[0] + [1] * 60}", "model.vocab_size=163840",
    "model.mtp_num_layers=null", "model.moe_router_num_groups=null", "model.moe_router_group_topk=null",
]  # fmt: skip


@cache
def rows() -> list[dict[str, Any]]:
    """Every published run."""
    data: list[dict[str, Any]] = json.loads((ROOT / "scripts/evidence/data/published_runs.json").read_text())["rows"]
    return data


@cache
def early() -> list[dict[str, Any]]:
    """Published runs of the releases before the first whose recipes are plain data."""
    data: list[dict[str, Any]] = json.loads((ROOT / "scripts/evidence/data/early_runs.json").read_text())["rows"]
    return data


@cache
def unfitted() -> list[dict[str, Any]]:
    """Published runs of later releases, and of Llama 3.1 405B: no choice about memory was based on them."""
    data: list[dict[str, Any]] = json.loads((ROOT / "scripts/evidence/data/unfitted_runs.json").read_text())["rows"]
    return data


def priced() -> list[dict[str, Any]]:
    """The runs that the step-time model can price."""
    return [row for row in rows() if row["model"] not in CANNOT]


def timed() -> list[dict[str, Any]]:
    """Runs of every release that can be priced and whose published layout is possible."""
    every = (*priced(), *unfitted(), *early())
    return [row for row in every if (row["id"], row["release"]) not in WRONG]


def run_of(row: dict[str, Any]) -> Run:
    """The published run as an mpbridge Run."""
    name = {"kimi_k2": "deepseek_v3_671b"}.get(row["model"], row["model"])
    moe = not row["model"].startswith("llama3")
    settings = dict(row["settings"])
    if row["release"] == "26.02" and settings.get("moe_flex_dispatcher_backend") == "deepep":
        del settings["moe_flex_dispatcher_backend"]  # release notes: DeepEP did not work in that container
    fsdp = bool(settings.get("use_megatron_fsdp"))
    given = [
        f"mixed_precision.recipe={RECIPES[row['precision']]}",
        f"mixed_precision.grad_reduce_in_fp32={'true' if row['model'] == 'kimi_k2' else 'false'}",
        f"parallel.tensor_model_parallel_size={row['tensor']}",
        f"parallel.pipeline_model_parallel_size={row['pipeline']}",
        f"parallel.context_parallel_size={row['context'] or 1}",
        f"parallel.virtual_pipeline_model_parallel_size={_yaml(row['virtual'])}",
        f"parallel.sequence_parallel={_yaml(row['tensor'] > 1)}",
        f"train.global_batch_size={row['global_batch']}",
        f"train.micro_batch_size={row['micro_batch']}",
        f"data.seq_length={row['sequence']}",
        "model.cross_entropy_loss_fusion=true",
        "model.cross_entropy_fusion_impl=te",
        "model.recompute_granularity=null",
        "model.recompute_modules=null",
        "model.num_layers_in_first_pipeline_stage=null",
        "model.num_layers_in_last_pipeline_stage=null",
        "model.bias_activation_fusion=true",  # the providers of Llama, DeepSeek and GPT-OSS, and the performance recipes of Qwen3
        "ddp.check_for_nan_in_grad=false",  # as every performance recipe has it
        f"model.gradient_accumulation_fusion={_yaml(not fsdp)}",  # Megatron Bridge's default
        f"model.tp_comm_overlap={_yaml(row['tensor'] > 1 and row['precision'] != 'NVFP4')}",
    ]
    if row["precision"] == "FP8":
        given.append("mixed_precision.first_last_layers_bf16=false")
    if moe:
        given += [f"parallel.expert_model_parallel_size={row['expert'] or 1}", "parallel.expert_tensor_parallel_size=1"]
    if name == "deepseek_v3_671b":
        given += (
            [
                "optimizer.use_precision_aware_optimizer=true",
                "optimizer.exp_avg_dtype=bf16",
                "optimizer.exp_avg_sq_dtype=bf16",
            ]
            if row["model"] != "kimi_k2"
            else []
        )
        given += _KIMI if row["model"] == "kimi_k2" else []
        given += ["model.mtp_num_layers=null"] if not _ahead(row) else []
        layout = _layout(row)
        given += [f"model.pipeline_model_parallel_layout='{layout}'"] if layout else []
    if fsdp:
        given += ["engine=megatron_fsdp", "ddp.data_parallel_sharding_strategy=optim_grads_params"]
    given += _settings(settings)
    box = ConfigContainer.load(ROOT / f"configs/{name}.yaml", given, check=False)
    run = box.resolved(row["gpus"], machine=machine(row["machine"]), versions=ASSUMED, training=False)
    # settings are written with megatron-core 0.16's names; this one it does not have
    fused = {"use_transformer_engine_op_fuser": True} if settings.get("cutedsl_fused_grouped_mlp") else {}
    core = dataclasses.replace(run.facts.versions, megatron_core=CORES[row["release"]])
    facts = dataclasses.replace(run.facts, model={**run.facts.model, **fused}, versions=core)
    return dataclasses.replace(run, facts=facts)


def _layout(row: dict[str, Any]) -> str | None:
    if row["settings"].get("pp_layout"):
        return str(row["settings"]["pp_layout"])
    if row["pipeline"] == 1:
        return None
    return _LAYOUTS[row["pipeline"], row["virtual"] or 1].format(tail="mL" if _ahead(row) else "L")


def _ahead(row: dict[str, Any]) -> bool:
    """Whether the run predicts a further token."""
    return row["model"] == "deepseek_v3_671b" and row["settings"].get("mtp", True)


def _settings(settings: dict[str, Any]) -> list[str]:
    found = []
    if settings.get("cuda_graph_impl") == "full_iteration":  # megatron-core 0.16's setting for it
        found += ["model.cuda_graph_impl=local", "model.cuda_graph_scope=full_iteration"]
    elif "cuda_graph_impl" in settings:
        found.append(f"model.cuda_graph_impl={settings['cuda_graph_impl']}")
    if "cuda_graph_scope" in settings:
        found.append(f"model.cuda_graph_scope={_yaml(settings['cuda_graph_scope'])}")
    if "recompute_modules" in settings:
        found += [
            "model.recompute_granularity=selective",
            f"model.recompute_modules={_yaml(settings['recompute_modules'])}",
        ]
    if "moe_flex_dispatcher_backend" in settings:
        found += [
            "model.moe_token_dispatcher_type=flex",
            f"model.moe_flex_dispatcher_backend={settings['moe_flex_dispatcher_backend']}",
        ]
    if settings.get("moe_a2a_overlap"):
        found.append("model.overlap_moe_expert_parallel_comm=true")
    if settings.get("fp8_dot_product_attention"):
        found.append("model.fp8_dot_product_attention=true")
    if "cpu_offloading_num_layers" in settings:
        found += [
            "model.cpu_offloading=true",
            f"model.cpu_offloading_num_layers={settings['cpu_offloading_num_layers']}",
        ]
    return found


def _yaml(value: Any) -> str:
    return json.dumps(value)
