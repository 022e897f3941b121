"""The engines' world of one and its device layer, for the tests that train megatron-core's GPT, and the compiler."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mpbridge.common.formats import DType
from mpbridge.numerics.kernels import kernel
from mpbridge.numerics.operands import COPY_OF
from mpbridge.numerics.quantizer import Quantizer, Randomness
from mpbridge.precision.policy import PrecisionPolicy, Quant, Region
from tests.backend.engines.conftest import layer, world

__all__ = ["layer", "world"]


CPU = torch.device("cpu")


def quant_of(scaling: str, format: str = "e4m3", **fields: Any) -> Quant:
    """The rule; NVFP4's elements are E2M1 in any case."""
    return Quant(format="e2m1" if scaling == "nvfp4" else format, scaling=scaling, **fields)  # type: ignore[arg-type]


def quantizer_of(quant: Quant, **how: Any) -> Quantizer:
    """Uncompiled unless asked for, of one linear, 'fc'."""
    return Quantizer(quant, ["fc"], **({"randomness": Randomness(1, CPU), "device": CPU, "compiled": False} | how))


def operand(q: Quantizer, x: torch.Tensor, side: str = "x", copy: str = "row") -> Any:
    """As the first GEMM that reads this copy of that side reads it."""
    gemm = next(gemm for (gemm, s), c in COPY_OF.items() if s == side and c == copy)
    return q.operand(x, slot="fc", gemm=gemm, side=side)  # type: ignore[arg-type]


def policy_of(*regions: Region, compute: DType = DType.BF16) -> PrecisionPolicy:
    """Those rules, with everything else in the compute dtype and gradients reduced in FP32."""
    rest = {"params": compute, "pipeline": compute, "output": compute}
    return PrecisionPolicy(compute=compute, reduce=DType.FP32, regions=regions, **rest)


def scale_of(quantizer: Any, slot: str, side: str) -> float:
    """The stored scale that delayed scaling gives the next operand of that kind."""
    table = quantizer.backward_table if side == "dy" else quantizer.forward_table
    return float(table.scale[table.names.index(f"{slot}.{side}")])


@pytest.fixture(scope="module")
def compiling() -> Iterator[None]:
    """Kernels are compiled, for tests that compare them with uncompiled ones: everywhere else the suite leaves the compiler off (tests/conftest.py)."""
    kernel.cache_clear()  # code that was called uncompiled once is never compiled
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(disable=False):
        patch.delenv("TORCHDYNAMO_DISABLE", raising=False)
        yield
    kernel.cache_clear()


@pytest.fixture
def torchaos_own() -> None:
    """torchao's MX and float8 modules as a second opinion; a release of it that needs a newer torch fails while it is imported."""
    try:
        importlib.import_module("torchao.prototype.moe_training.mxfp8_linear")
        importlib.import_module("torchao.float8.float8_training_tensor")
    except (ImportError, AttributeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "driver" not in str(error):
            raise
        pytest.skip(f"torchao does not run with torch {torch.__version__}: {error}")
