"""Where a recipe leaves the storage of parameters open, the optimizer decides it."""

from __future__ import annotations

from mpbridge.formats import DType, dtype
from mpbridge.precision.config import MixedPrecisionConfig

TORCHS = ("torch_adamw", "sgd")
"""optimizer.optimizer of the FSDP2 engine that are torch's own; "adam" is FusedAdam where the recipe's states need it."""


def storage_default(optimizer: str, requested: object = None, *, peft: bool = False) -> DType:
    """Storage of parameters where the author left it open (None or 'auto'); what the author says always wins.

    optimizer: 'fused' or 'adam' (FusedAdam), or a name of torch's ('torch_adamw', 'torch.optim.AdamW', 'sgd'). torch's optimizers keep their states in the
    parameters' dtype, so full training with them starts from FP32; FusedAdam keeps its own states, and PEFT trains few parameters for a short time: BF16.
    Rule: NeMo AutoModel PR 2248, precision_warnings.py.
    """
    if requested is not None and requested != "auto":
        return dtype(requested)
    name = optimizer.lower().rpartition(".")[2]
    torchs = name not in ("adam", "fused", "fusedadam", "fused_adam", "cpufusedadam")
    return DType.FP32 if torchs and not peft else DType.BF16


def with_storage(config: MixedPrecisionConfig, *, engine: str | None, optimizer: str) -> MixedPrecisionConfig:
    """`config` with FP32 storage where FSDP2 would train unset 16-bit storage with an optimizer of torch's."""
    stored = config.stored()
    low = stored["bf16"] or stored["fp16"]
    if engine != "fsdp2" or optimizer not in TORCHS or not low or stored["params_dtype"] is not None:
        return config
    if storage_default(optimizer) is not DType.FP32:
        return config
    return config.derive(params_dtype=DType.FP32, main_params_dtype=stored["main_params_dtype"] or DType.FP32)
