"""plan and apply inside somebody else's training script."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import ROOT, python

SCRIPT = Path(__file__).with_name("foreign_script.py")


@functools.cache
def ran(recipe: str, *options: str) -> subprocess.CompletedProcess[str]:
    return python([str(SCRIPT), recipe, *options], timeout=200)


@functools.cache
def alone(recipe: str) -> subprocess.CompletedProcess[str]:
    """In a process that has imported nothing yet, as an author's would be."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), recipe]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(
    ("recipe", "dtype", "skips"),
    [("fp32", "float32", False), ("bf16_mixed", "bfloat16", False), ("fp16_mixed", "float16", True)],
)
def test_a_foreign_loop_trains_in_the_recipes_precision(recipe: str, dtype: str, skips: bool) -> None:
    done = alone(recipe) if recipe == "bf16_mixed" else ran(recipe)
    assert done.returncode == 0, done.stderr
    found, first, last, skipped = done.stdout.split()[-4:]
    assert found == dtype
    assert float(last) < 0.5 * float(first)
    # from 2**32 the first FP16 steps overflow: they are skipped, and the author's fatal NaN check is out of the way
    assert (int(skipped) > 0) is skips
    assert int(skipped) < 25


def test_a_quantized_recipe_never_trains_as_bf16_there() -> None:
    done = ran("bf16_with_fp8_current_scaling_mixed")
    assert done.returncode != 0
    assert "mpbridge.common.errors.Refused" in done.stderr
    assert "cannot run this recipe" in done.stderr


@pytest.mark.parametrize("recipe", ["bf16_mixed", "fp16_mixed"])
def test_wrap_gives_what_the_same_steps_by_hand_give(recipe: str) -> None:
    wrapped, by_hand = alone(recipe) if recipe == "bf16_mixed" else ran(recipe), ran(recipe, "--by-hand")
    assert wrapped.stdout.splitlines()[-2] == by_hand.stdout.splitlines()[-2]
    assert len(eval(wrapped.stdout.splitlines()[-2])) == 40  # every loss of the run


def test_a_model_that_was_built_before_apply_is_refused() -> None:
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    import mpbridge
    from mpbridge.common.errors import BadValue, Refused

    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    early = torch.nn.Linear(4, 4)
    early.config = config  # type: ignore[assignment]
    policy = mpbridge.resolve(mpbridge.get_mixed_precision_config("bf16_mixed"))
    made = mpbridge.plan(policy, model=config, optimizer=OptimizerConfig(lr=1e-3), ddp=DistributedDataParallelConfig())
    with pytest.raises(Refused, match=r"params_dtype=fp32.*apply\(plan\) before the model is built"):
        mpbridge.wrap(early, made, OptimizerConfig(lr=1e-3))
    with pytest.raises(BadValue, match="expected the Plan"):
        mpbridge.wrap(early, None, OptimizerConfig(lr=1e-3))  # type: ignore[arg-type]
    with pytest.raises(BadValue, match="without a live DDP config"):
        mpbridge.wrap(early, mpbridge.plan(policy, model=config), OptimizerConfig(lr=1e-3))
