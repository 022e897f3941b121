"""If a recipe leaves the storage dtype of parameters open, the optimizer decides it."""

from __future__ import annotations

from mpbridge.common.facts import MUONS, OPTIMIZERS
from mpbridge.common.formats import DType
from mpbridge.common.traits import DEFAULT, known
from mpbridge.precision.config import MixedPrecisionConfig

TORCHS = tuple(name for name in OPTIMIZERS if name not in ("adam", *MUONS))
"""Values of optimizer.optimizer that are torch's own on the FSDP2 engine; "adam" is FusedAdam if the recipe's states need it."""


def with_storage(config: MixedPrecisionConfig, *, engine: str | None, optimizer: str) -> MixedPrecisionConfig:
    """`config` with FP32 storage if FSDP2 would otherwise train 16-bit storage, not set by the author, with one of torch's optimizers.

    torch's optimizers keep their states in the parameters' dtype; FusedAdam keeps its own states. An explicit setting always wins.
    Rule: NeMo AutoModel PR 2248, precision_warnings.py.
    """
    stored = config.stored()
    low = stored["bf16"] or stored["fp16"]
    found = known(engine or DEFAULT)
    torchs = found is not None and found.main_weights == "optimizer" and optimizer in TORCHS
    if not torchs or not low or stored["params_dtype"] is not None:
        return config
    return config.derive(params_dtype=DType.FP32, main_params_dtype=stored["main_params_dtype"] or DType.FP32)
