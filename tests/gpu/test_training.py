"""Recipes on a real GPU: they train, their audit passes, planted faults are named, losses agree, memory is as predicted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.conftest import is_played, sizes

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.gpu

HOPPER = [
    "bf16_mixed", "fp16_mixed", "bf16_with_fp8_delayed_scaling_mixed", "bf16_with_fp8_current_scaling_mixed", "bf16_with_fp8_subchannel_scaling_mixed",
    "nanov2_bf16_with_fp8_current_scaling_mixed", "bf16_mixed_bf16_moments", "full_bf16",
]  # fmt: skip
GATHER = [name for name in HOPPER if "fp8" in name and not name.startswith("nanov2")]


def losses(run, **options):
    from mpbridge.training.loop import pretrain

    return pretrain(run, quiet=True, **options)


@pytest.mark.parametrize("name", HOPPER)
def test_recipe_trains_and_its_audit_passes(name, on_gpu, gpu_run):
    on_gpu(name)
    # six layers, so that a recipe with two BF16 layers at each end still quantizes something
    summary = losses(gpu_run(name, "model.num_layers=6", "train.train_iters=60"))
    assert summary.last_loss < summary.first_loss - 1.0


@pytest.mark.parametrize("name", GATHER)
def test_weights_stored_in_fp8_or_not_both_train(name, on_gpu, gpu_run):
    on_gpu(name)
    for stored in ("true", "false"):
        shared = ("ddp.use_distributed_optimizer=true", "train.train_iters=40")
        summary = losses(gpu_run(name, f"mixed_precision.fp8_param_gather={stored}", *shared))
        assert summary.last_loss < summary.first_loss - 0.5


@pytest.mark.parametrize("name", GATHER)
def test_precision_aware_optimizer_trains_under_fp8(name, on_gpu, gpu_run):
    on_gpu(name)
    # FusedAdam would keep the lower halves of BF16 weights for weights that rest in FP8
    aware = ("optimizer.use_precision_aware_optimizer=true", "optimizer.store_param_remainders=false")
    summary = losses(gpu_run(name, *aware, "ddp.use_distributed_optimizer=true", "train.train_iters=40"))
    assert summary.last_loss < summary.first_loss - 0.5


@pytest.mark.parametrize("name", ["bf16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed"])
def test_blackwell_recipes_are_refused_with_the_reason_and_run_emulated(name, on_gpu, gpu_run):
    from mpbridge.common.errors import Refused
    from mpbridge.common.probe import this_machine

    on_gpu()
    if this_machine().arch >= (10, 0):
        pytest.skip("this machine runs them natively")
    with pytest.raises(Refused, match="Blackwell"):
        losses(gpu_run(name, "train.train_iters=2"))
    summary = losses(gpu_run(name, "emulate=true", "train.train_iters=20"))
    assert summary.last_loss < summary.first_loss


@pytest.mark.parametrize(
    ("name", "engine"),
    [("fp32_params_bf16_compute", "fsdp2"), ("bf16_params_fp32_states", "fsdp2"), ("bf16_megatron_fsdp", "megatron_fsdp")],
)  # fmt: skip
def test_sharding_engines_train_at_one_process(name, engine, on_gpu, gpu_run):
    on_gpu()
    summary = losses(gpu_run(name, f"engine={engine}", "train.train_iters=40"))
    assert summary.last_loss < summary.first_loss - 0.5


def test_audit_names_a_moment_that_was_cast(on_gpu, gpu_run):
    import torch

    from mpbridge.common.errors import AuditFailed
    from mpbridge.training.base import Hook

    on_gpu()

    class Plant(Hook):
        def built(self, training):
            inner = training.engine.optimizer.chained_optimizers[0].optimizer
            step = inner.step

            def cast(*args, **kwargs):
                out = step(*args, **kwargs)
                for state in inner.state.values():
                    state["exp_avg"] = state["exp_avg"].to(torch.bfloat16)
                return out

            inner.step = cast

    with pytest.raises(AuditFailed, match="exp_avg"):
        # audited behind the first step: FusedAdam itself refuses such a moment in its second
        losses(gpu_run("bf16_mixed", "train.train_iters=8", "scheduler.lr_warmup_iters=0"), hooks=[Plant()])


REFERENCE: list[float] = []
"""bf16_mixed's held-out loss, trained once for all recipes."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in HOPPER if "fp8" in n])
def test_fp8_loss_is_within_one_percent_of_bf16_after_500_steps_of_125m(name, on_gpu, gpu_run, real_gpu):
    on_gpu(name)
    real_gpu("500 steps of 125 million parameters take a GPU's speed")
    shared = [
        "data.corpus=stdlib", "model.vocab_size=384", "train.train_iters=500", "train.micro_batch_size=16", "train.global_batch_size=16",
        "scheduler.lr_warmup_iters=50", "train.eval_interval=500", "train.eval_iters=8",
    ]  # fmt: skip
    if not REFERENCE:
        REFERENCE.append(losses(gpu_run("bf16_mixed", *shared, config="gpt_125m")).eval_loss)
    found = losses(gpu_run(name, *shared, config="gpt_125m")).eval_loss
    assert found == pytest.approx(REFERENCE[0], rel=0.01)


def test_memory_by_role_is_what_was_predicted(on_gpu, gpu_run, world, real_gpu):
    real_gpu("no CUDA memory is allocated")
    import torch

    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.registry import build_engine
    from mpbridge.planning.memory.roles import roles
    from tests.gpu.feed import batches

    on_gpu()
    wide = ("model.hidden_size=2048", "model.ffn_hidden_size=5504", "model.num_attention_heads=16")
    run = gpu_run("bf16_mixed", "model.num_layers=16", *wide)
    with device_layer(True):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        engine = build_engine(run)
        try:
            engine.train_step(batches(run), microbatches=1)
            torch.cuda.synchronize()
            found = torch.cuda.memory_allocated() - before
        finally:
            engine.close()
    predicted = sum(role.bytes for role in roles(run.policy, run.facts, rank=0))
    assert found == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("name", ["bf16_mixed", "fp16_mixed", "bf16_with_fp8_current_scaling_mixed"])
def test_resumed_run_equals_the_uninterrupted_one(name, on_gpu, gpu_run, tmp_path):
    on_gpu(name)
    common = ["train.train_iters=20", "train.deterministic=true"]
    whole = losses(gpu_run(name, *common))
    common += [f"checkpoint.{way}={tmp_path / 'checkpoints'}" for way in ("save", "load")]
    losses(gpu_run(name, *common, "train.exit_interval=10"))
    assert losses(gpu_run(name, *common)).last_loss == whole.last_loss


@pytest.mark.parametrize("name", ["bf16_mixed", "bf16_with_fp8_current_scaling_mixed"])
def test_a_gpus_checkpoint_goes_on_on_a_cpu(name, on_gpu, gpu_run, tmp_path):
    on_gpu(name)
    shape = ["model.num_layers=4", "data.seq_length=128", "mixed_precision.fp8_param_gather=false"]
    shape += [f"checkpoint.{way}={tmp_path / 'checkpoints'}" for way in ("save", "load")]
    before = losses(gpu_run(name, *shape, "train.train_iters=30", "train.exit_interval=20")).last_loss
    wide = [*sizes(128), "train.global_batch_size=4"] if is_played() else sizes(512)
    # a process of its own, not a rank of this one's world
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "MPBRIDGE_PLAYED")
    outside = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, "scripts/pretrain.py", "--config", "configs/gpt_tiny.yaml", "--recipe", name, *wide]
    command += [
        *shape,
        "train.train_iters=30",
        f"logger.log_dir={tmp_path / 'cpu'}",
        *(["--emulate"] if "fp8" in name else []),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=outside | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=840, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "cpu" / "metrics.jsonl").read_text().splitlines()]
    first = next(row for row in rows if "loss" in row)
    assert first["iteration"] == 21
    assert first["loss"] < before + 0.3
