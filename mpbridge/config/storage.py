"""Where a recipe leaves the storage of parameters open, the optimizer decides it."""

from __future__ import annotations

from mpbridge.formats import DType
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.traits import DEFAULT, known

TORCHS = ("torch_adamw", "sgd")
"""optimizer.optimizer of the FSDP2 engine that are torch's own; "adam" is FusedAdam where the recipe's states need it."""


def with_storage(config: MixedPrecisionConfig, *, engine: str | None, optimizer: str) -> MixedPrecisionConfig:
    """`config` with FP32 storage where FSDP2 would train unset 16-bit storage with an optimizer of torch's.

    torch's optimizers keep their states in the parameters' dtype; FusedAdam keeps its own states. What the author says always wins.
    Rule: NeMo AutoModel PR 2248, precision_warnings.py.
    """
    stored = config.stored()
    low = stored["bf16"] or stored["fp16"]
    found = known(engine or DEFAULT)
    torchs = found is not None and found.main_weights == "optimizer" and optimizer in TORCHS
    if not torchs or not low or stored["params_dtype"] is not None:
        return config
    return config.derive(params_dtype=DType.FP32, main_params_dtype=stored["main_params_dtype"] or DType.FP32)
