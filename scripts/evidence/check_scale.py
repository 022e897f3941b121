"""Builds ranks of large worlds with the real megatron-core, on fake groups and meta tensors, and prints their bytes with the prediction.

    python scripts/evidence/check_scale.py              # the shipped configurations and layouts that were once verified by hand
    python scripts/evidence/check_scale.py --only 405B  # the rows whose name contains that word

Exits with 1 on a difference, an audit finding, more than 8 s of CPU or more than 500 MiB for a rank.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that it runs in a checkout without installation

from mpbridge.common.errors import MpbridgeError
from mpbridge.settings.container import ConfigContainer
from mpbridge.training.simulate.world import simulate, simulated_run

SECONDS, MIB = 8, 500
NO_VIRTUAL = "parallel.virtual_pipeline_model_parallel_size=null"
_DEEPSEEK = ["mixed_precision.recipe=bf16_mixed", "parallel.expert_model_parallel_size=64", "model.num_layers_in_first_pipeline_stage=null", "model.num_layers_in_last_pipeline_stage=null"]  # fmt: skip
_UNCOUNTED = ["model.account_for_embedding_in_pipeline_split=false", "model.account_for_loss_in_pipeline_split=false"]


def _deepseek(layout: str, pipeline: int, virtual: int | str) -> list[str]:
    return [*_DEEPSEEK, f"model.pipeline_model_parallel_layout='{layout}'", f"parallel.pipeline_model_parallel_size={pipeline}", f"parallel.virtual_pipeline_model_parallel_size={virtual}"]  # fmt: skip


ROWS: dict[str, tuple[str, int, list[int], list[str]]] = {
    "8B at 1,024, TP 2": ("llama3_8b", 1024, [0, 777], []),
    "8B, CP 4, BF16 moments": ("llama3_8b", 1024, [0, 777], ["parallel.context_parallel_size=4", "mixed_precision.recipe=bf16_mixed_bf16_moments"]),
    "70B, TP 8 PP 4": ("llama3_70b", 1024, [0, 300, 1023], ["parallel.tensor_model_parallel_size=8", "parallel.pipeline_model_parallel_size=4", NO_VIRTUAL, "train.global_batch_size=1024"]),
    "70B, VPP 5": ("llama3_70b", 4096, [0, 4095], ["train.global_batch_size=4096"]),
    "70B, embedding and loss counted": ("llama3_70b", 1024, [0, 1023], ["model.num_layers=78", "model.account_for_embedding_in_pipeline_split=true", "model.account_for_loss_in_pipeline_split=true", "train.global_batch_size=1024"]),
    "70B, PP 8, bucket padding": ("llama3_70b", 1024, [0], ["ddp.pad_buckets_for_high_nccl_busbw=true", "parallel.pipeline_model_parallel_size=8", NO_VIRTUAL, "train.global_batch_size=1024"]),
    "405B, uneven stages": ("llama3_405b", 16384, [0, 8191, 16383], ["parallel.pipeline_model_parallel_size=16", "parallel.context_parallel_size=1", NO_VIRTUAL, *_UNCOUNTED, "model.num_layers_in_first_pipeline_stage=7", "model.num_layers_in_last_pipeline_stage=7", "train.global_batch_size=4096"]),
    "DeepSeek-V3, BF16, PP 8 uneven": ("deepseek_v3_671b", 2048, [0, 1024, 2047], ["mixed_precision.recipe=bf16_mixed"]),
    "DeepSeek-V3, BF16, PP 16 by a layout": ("deepseek_v3_671b", 1024, [0, 512, 1023], _deepseek("Et*4|(tttt|)*14tmL", 16, "null")),
    "DeepSeek-V3, BF16, PP 4 x 4": ("deepseek_v3_671b", 1024, [0, 1023], _deepseek("Et*4|(tttt|)*14tmL", 4, 4)),
    "DeepSeek-V3, BF16, PP 8 x 4": ("deepseek_v3_671b", 1024, [0, 1023], _deepseek("Et|(tt|)*30mL", 8, 4)),
    "405B as shipped": ("llama3_405b", 16384, [0, 16383], ["train.global_batch_size=4096"]),
    "DeepSeek-V3 as shipped": ("deepseek_v3_671b", 2048, [0, 1024, 2047], []),
    "Qwen3 30B as shipped": ("qwen3_30b_a3b", 16, [0, 15], []),
    "Qwen3 235B as shipped": ("qwen3_235b_a22b", 256, [0, 255], []),
    "GPT-OSS 120B as shipped": ("gpt_oss_120b", 64, [0, 63], []),
    "8B as shipped": ("llama3_8b", 16, [0, 15], []),
    "70B as shipped": ("llama3_70b", 64, [0, 63], []),
    "125M as shipped": ("gpt_125m", 8, [0, 7], []),
    "tiny as shipped": ("gpt_tiny", 4, [0, 3], []),
    "tiny mixture as shipped": ("moe_tiny", 4, [0, 3], []),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose name contains it")
    args = parser.parse_args()
    bad = 0
    print(f"{'row':38s} {'ranks':>6s} {'rank':>6s} {'live bytes':>15s} {'off':>4s} {'rows':>5s} {'audit':>7s} {'CPU s':>6s} {'MiB':>5s}")  # fmt: skip
    for name, (config, world, ranks, settings) in ROWS.items():
        if args.only.lower() not in name.lower():
            continue
        try:
            run, _ = simulated_run(ConfigContainer.load(ROOT / f"configs/{config}.yaml", settings, check=False), world)
            found = simulate(run, ranks)
        except MpbridgeError as error:
            print(f"{name:38s} {error}")
            bad += 1
            continue
        for one in found:
            size = one.peak / 2**20
            good = one.ok and one.live == one.predicted and one.seconds <= SECONDS and size <= MIB
            bad += not good
            print(f"{name:38s} {world:6d} {one.rank:6d} {one.live:15,d} {one.live - one.predicted:4d} {len(one.differences):2d}/{one.rows:<5d} {one.audited - len(one.audit):3d}/{one.audited:<3d} {one.seconds:6.1f} {size:5.0f}{'' if good else '  <-'}", flush=True)  # fmt: skip
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
