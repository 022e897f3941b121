"""Compares predictions for hybrids with Mamba layers with Megatron-LM's measured memory and with published speeds. No constant was fitted to them.

python scripts/evidence/check_hybrids.py
"""

from __future__ import annotations

import dataclasses
import json
import statistics

import measured
from published import CORES, RECIPES, ROOT

from mpbridge.common.machines import machine
from mpbridge.planning.capability import ASSUMED
from mpbridge.planning.estimate.gemms import model_flops_per_token
from mpbridge.planning.estimate.predict import estimate
from mpbridge.planning.memory.by_role import memory
from mpbridge.settings.container import ConfigContainer, Run

MIB = 2**20


def memories() -> None:
    print("live bytes and peak beside Megatron-LM's golden values, MiB")
    for row in measured.hybrids():
        run = measured.run_of(row)
        found = memory(run.policy, run.facts, rank=run.facts.parallel.world_size - 1)
        live = found.states + found.communication
        print(
            f"  {row['case'].partition('/')[2][:52]:52s} {row['machine']:5s} live {live / MIB:9.1f} of {row['allocated'] / MIB:9.1f}"
            f" ({live / row['allocated'] - 1:+.1%}), peak {found.total / MIB:9.1f} of {row['peak'] / MIB:9.1f} ({found.total / row['peak'] - 1:+.1%})"
        )


def run_of(row: dict) -> Run:
    """A published run. The two further tokens of Nemotron 3 Super, an attention layer and a mixture each, are counted, though megatron-core 0.16.1 builds none."""
    ahead = row["model"] == "nemotron_3_super"
    given = [
        f"mixed_precision.recipe={'nemotron_3_super_bf16_with_nvfp4_mixed' if row['precision'] == 'NVFP4' else RECIPES[row['precision']]}",
        "mixed_precision.grad_reduce_in_fp32=false",
        f"parallel.tensor_model_parallel_size={row['tensor']}",
        f"parallel.sequence_parallel={'true' if row['tensor'] > 1 else 'false'}",
        f"parallel.expert_model_parallel_size={row['expert']}",
        "parallel.expert_tensor_parallel_size=1",
        f"train.global_batch_size={row['global_batch']}",
        f"train.micro_batch_size={row['micro_batch']}",
        "data.seq_length=8192",
        "model.cross_entropy_loss_fusion=true",
        "model.cross_entropy_fusion_impl=te",
        f"model.recompute_granularity={'selective' if row['machine'] == 'H100' else 'null'}",
        f"model.recompute_modules={'[moe,layernorm]' if row['machine'] == 'H100' else 'null'}",
        "model.moe_token_dispatcher_type=flex",
        "model.moe_flex_dispatcher_backend=hybridep",
        "model.cuda_graph_impl=transformer_engine",
        "model.cuda_graph_scope=[attn,mamba,moe_router,moe_preprocess]",
        "ddp.check_for_nan_in_grad=false",
    ]
    box = ConfigContainer.load(ROOT / f"configs/{row['model']}.yaml", given, check=False)
    run = box.resolved(row["gpus"], machine=machine(row["machine"]), versions=ASSUMED, training=False)
    shape = run.facts.shape
    if ahead:  # (a layer for a further token is built like the last, a mixture)
        pattern = f"{shape.pattern[:-1]}**E"
        shape = dataclasses.replace(
            shape,
            pattern=pattern,
            num_layers=len(pattern),
            expert_layers=tuple(one == "E" for one in pattern),
            mtp_layers=2,
        )
    core = dataclasses.replace(run.facts.versions, megatron_core=CORES[row["release"]])
    facts = dataclasses.replace(
        run.facts, shape=shape, versions=core, model={**run.facts.model, "use_transformer_engine_op_fuser": True}
    )
    return dataclasses.replace(run, facts=facts)


def speeds() -> None:
    rows = json.loads((ROOT / "scripts/evidence/data/hybrid_runs.json").read_text())["rows"]
    print("published runs: GFLOP a token as published, with the real channels; tokens/s/GPU published and predicted")
    errors: list[float] = []
    for row in rows:
        run = run_of(row)
        shape = run.facts.shape
        found = estimate(run.policy, run.facts)
        tokens = row["global_batch"] * 8192 / found.seconds / row["gpus"]
        errors.append(tokens / row["tokens"] - 1)
        inside = "inside" if abs(row["tokens"] / tokens - 1) <= found.band else "outside"
        print(
            f"  {row['release']:8s} {row['model']:16s} {row['machine']:5s} {row['precision']:5s} {1e3 * row['tflops'] / row['tokens']:6.2f}"
            f" {model_flops_per_token(shape, run.facts.model) / 1e9:6.2f}  {row['tokens']:6.0f} {tokens:6.0f} ({errors[-1]:+.0%}, {inside} of the band of {found.band:.0%})"
        )
    worst = sorted(map(abs, errors))
    print(f"  {len(rows)} runs: median error {statistics.median(worst):.0%}, largest {worst[-1]:.0%}")


if __name__ == "__main__":
    memories()
    speeds()
