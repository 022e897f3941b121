"""Live runs of DeepSpeed on a CPU: its own loop, and through accelerate and Lightning."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from mpbridge.observe.witnessing.callbacks import lightning_callback
from mpbridge.observe.witnessing.report import Witnessed
from mpbridge.observe.witnessing.witness import witness
from scripts.evidence.witness_common import VOCABULARY, Case, Net, accelerated, adam, lightning_module, tokens

_BF16 = {"bf16": {"enabled": True}}
_ALL = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def engine(stage: int, **config: Any) -> Witnessed:
    """DeepSpeed's own loop at a ZeRO stage."""
    import deepspeed

    model = Net()
    made, *_ = deepspeed.initialize(
        model=model,
        optimizer=adam(model),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage},
            **_ALL,
            **config,
        },
    )
    seen = witness(made, made.optimizer, at={2})
    for step in range(4):
        with seen.microbatch(lambda: step % 2 == 1):  # noqa: B023 (called within the turn)
            made.backward(made(tokens(step)))
            made.step()
    return seen.report


def wide_accumulator(*, confused: bool) -> Witnessed:
    """ZeRO 1 that accumulates in FP32. Release 0.18.4 has one word for two optimizers, and builds the other one, which divides nothing and accumulates in BF16."""
    from deepspeed.runtime import constants

    if (getattr(constants, "DDP_BFLOAT16", None) == constants.BFLOAT16) is not confused:
        raise ImportError(
            f"the installed release is {'not ' if confused else ''}one that mistakes its BF16 optimizer for another"
        )
    return engine(1, **_BF16, data_types={"grad_accum_dtype": "fp32"})


def accelerate(stage: int) -> Witnessed:
    """accelerate's DeepSpeedPlugin; accelerate ignores the plugin if it is told to use a CPU, and uses it if it finds the CPU by itself."""
    import deepspeed  # noqa: F401 (so that a missing package is reported before anything is set)
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    before = {name: os.environ.pop(name, None) for name in ("ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP")}
    plugin = DeepSpeedPlugin(
        hf_ds_config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage},
            **_ALL,
            **_BF16,
        }
    )
    try:
        accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)
        model = Net()
        return accelerated(accelerator, *accelerator.prepare(model, adam(model)))
    finally:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
        AcceleratorState._reset_state(True)


def lightning(precision: str) -> Witnessed:
    """Lightning's DeepSpeedStrategy, which requires GPUs only by its accelerator's class and by device numbers."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DeepSpeedStrategy, ParallelStrategy

    class OnAnyDevice(DeepSpeedStrategy):
        def setup_environment(self) -> None:
            ParallelStrategy.setup_environment(self)

        def setup_distributed(self) -> None:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu", 0)  # DeepSpeed wants a number

    follows = lightning_callback(at={2})
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=OnAnyDevice(stage=1),
        precision=precision,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[follows],
    )
    trainer.strategy.config.update(_ALL)
    trainer.fit(lightning_module(), torch.utils.data.DataLoader(torch.randint(0, VOCABULARY, (64, 8)), batch_size=4))
    return follows.report


CASES: tuple[Case, ...] = (
    Case("deepspeed", "ZeRO 1", lambda: engine(1, **_BF16), word="bf16.enabled"),
    Case("deepspeed", "ZeRO 2", lambda: engine(2, **_BF16), word="bf16.enabled"),
    Case("deepspeed", "ZeRO 3", lambda: engine(3, **_BF16), word="bf16.enabled"),
    Case(
        "deepspeed",
        "ZeRO 1, data_types.grad_accum_dtype fp32",
        lambda: wide_accumulator(confused=False),
        word="bf16.enabled",
    ),
    Case(
        "deepspeed",
        "ZeRO 1, data_types.grad_accum_dtype fp32, release 0.18.4: without ZeRO",
        lambda: wide_accumulator(confused=True),
        word="bf16.enabled",
    ),
    Case(
        "deepspeed",
        "torch_autocast.enabled",
        lambda: engine(3, torch_autocast={"enabled": True, "dtype": "bfloat16"}),
        word="torch_autocast.enabled",
    ),
    Case("accelerate", "DeepSpeed, ZeRO 1", lambda: accelerate(1), several=True),
    Case("lightning", "DeepSpeed: both words alike", lambda: lightning("bf16-mixed"), word="bf16-mixed", several=True),
    Case("lightning", "DeepSpeed: both words alike", lambda: lightning("bf16-true"), word="bf16-true", several=True),
)
