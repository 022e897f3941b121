"""Transformer Engine's process-wide state, which is cleared when an engine closes."""

from __future__ import annotations

import sys
from typing import Any


def forget_amaxes() -> None:
    """Empties the lists of amax histories that delayed scaling reduces and updates at the end of every quantization context.

    They hold the tensors of every module that ever ran, and the groups they were reduced over: the process's next model would continue to reduce those
    of the previous one, and wait for ranks that do not (FP8GlobalStateManager.global_amax_buffer, pytorch/quantization.py; pytorch/fp8.py until release 2.7).
    """
    for name in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):
        manager: Any = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
        if manager is not None:
            manager.reset()
            return
