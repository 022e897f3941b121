"""Run by torchrun, two processes: runs over Transformer Engine in one world, each audited in every step. Prints a JSON line for each.

two_ranks.py MACHINE TE NAME ...
"""

import json
import sys
from pathlib import Path

import mpbridge
from mpbridge import ConfigContainer, transformer_engine_on_cpu

ROOT = Path(__file__).resolve().parents[2]
DELAYED, TENSORWISE = "bf16_with_fp8_delayed_scaling_mixed", "bf16_with_fp8_current_scaling_mixed"
BLOCKWISE, MXFP8, NVFP4 = "bf16_with_fp8_subchannel_scaling_mixed", "bf16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed"
SHAPE = (
    "model.num_layers=2", "model.hidden_size=128", "model.ffn_hidden_size=256", "model.max_sequence_length=64", "data.seq_length=64",
    "train.train_iters=3", "train.global_batch_size=4", "train.eval_interval=null", "ddp.use_distributed_optimizer=true", "scheduler.lr_warmup_iters=0",
    "train.audit=stop", "audit.every=1",
)  # fmt: skip
EXPERTS = (
    "model.moe_layer_freq=[0,1]", "model.moe_ffn_hidden_size=128", "model.moe_shared_expert_intermediate_size=128", "model.moe_grouped_gemm=true",
)  # fmt: skip
OVERLAP = ("ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true")
WHOLE = "mixed_precision.first_last_layers_bf16=false"
TENSOR = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
PIPE = ("parallel.pipeline_model_parallel_size=2", "train.micro_batch_size=2")
EXPERT = ("parallel.expert_model_parallel_size=2",)
RUNS = {
    "data parallel": (TENSORWISE, WHOLE),
    "data parallel, overlap": (TENSORWISE, WHOLE, *OVERLAP),
    "delayed": (DELAYED, *OVERLAP),
    "blockwise at rest": (BLOCKWISE, "mixed_precision.fp8_param_gather=true"),
    "tensor and sequence parallel": (TENSORWISE, WHOLE, *TENSOR),
    "delayed, tensor parallel": (DELAYED, *TENSOR),
    "pipeline": (TENSORWISE, WHOLE, *PIPE),
    "delayed, pipeline": (DELAYED, *PIPE),
    "experts": (TENSORWISE, WHOLE, *EXPERT),
    "delayed, experts": (DELAYED, *EXPERT),
    "mxfp8": (MXFP8, *OVERLAP),
    "mxfp8, tensor parallel": (MXFP8, *OVERLAP, *TENSOR),
    "mxfp8, pipeline": (MXFP8, *OVERLAP, *PIPE),
    "mxfp8, experts": (MXFP8, *OVERLAP, *EXPERT),
    "nvfp4": (NVFP4,),
    "nvfp4, tensor parallel": (NVFP4, *TENSOR),
    "nvfp4, experts": (NVFP4, *EXPERT),
    "precision-aware, FP8 moments": (  # most second moments are flushed to zero: at gpt_tiny's rate weights move too far
        "bf16_mixed", "optimizer.lr=1e-4", "optimizer.min_lr=0", "optimizer.use_precision_aware_optimizer=true", "optimizer.exp_avg_dtype=fp8", "optimizer.exp_avg_sq_dtype=fp8",
    ),
}  # fmt: skip
"""Name -> recipe and overrides."""


REGISTRY = "registry"
"""A name that stands for every recipe of the registry that the machine runs, on both models."""


def settings(name: str, played: list[str]) -> tuple[str, list[str]]:
    """The model of a run, and its overrides."""
    recipe, *overrides = RUNS[name]
    experts = "experts" in name
    chosen = [f"mixed_precision.recipe={recipe}", *SHAPE, *(EXPERTS if experts else ()), *played, *overrides]
    return "moe_tiny" if experts else "gpt_tiny", chosen


def registry(played: list[str]) -> dict[str, tuple[str, list[str]]]:
    """The same for every recipe of the registry."""
    from mpbridge.precision.registry import recipes
    from tests.te_cpu.inside.matrix import native, settings_of

    return {
        f"{name}, {model}": (model, [f"mixed_precision.recipe={name}", *SHAPE, *played, *settings_of(name, model)])
        for name in recipes
        if native(name)
        for model in ("gpt_tiny", "moe_tiny")
    }


def main() -> None:
    machine, te, *names = sys.argv[1:]
    played = ["emulate=te", f"target={machine}", f"te='{te}'"]
    with transformer_engine_on_cpu(machine, te=te):
        import torch.distributed as dist

        from mpbridge.training.process import process_group

        runs = registry(played) if names == [REGISTRY] else {name: settings(name, played) for name in names}
        with process_group(False):
            for name, (model, chosen) in runs.items():
                config = ConfigContainer.load(ROOT / f"configs/{model}.yaml", chosen)
                summary = mpbridge.pretrain(config.resolved(world_size=dist.get_world_size()), quiet=True)
                if dist.get_rank() == 0:
                    said = {"name": name, "first": summary.first_loss, "last": summary.last_loss}
                    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
