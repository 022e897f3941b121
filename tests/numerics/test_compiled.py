"""Compiled kernels give the bits of uncompiled ones, which the other files compare with references. One file: torch's compiler takes seconds to import."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpbridge.numerics import emulate_linears, kernels
from tests.numerics import golden
from tests.numerics.conftest import operand, quant_of, quantizer_of
from tests.numerics.test_linear import data, gradients, model, policy

pytestmark = pytest.mark.usefixtures("compiling")

# every kernel of NVFP4; of the other scalings each kernel and each format once, below
SLOWLY = [pytest.param(scaling, marks=pytest.mark.slow) for scaling in ("delayed", "blockwise", "mxfp8")]


@pytest.mark.parametrize("scaling", [*SLOWLY, "nvfp4"])
def test_compiled_and_eager_kernels_give_the_same_bits(scaling: str) -> None:
    results = []
    for compiled in (False, True):
        net = model()
        emulation = emulate_linears(net, policy(scaling), compiled=compiled)
        for _ in range(2):
            emulation.step_begin()
            result = gradients(net, data())
        results.append(result)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


ROWS = (("backward", "high_precision"), ("hadamard", False), ("row_scaled_activations", True))


@pytest.mark.parametrize(
    ("scaling", "format", "side", "copy", "options"),
    [
        ("blockwise", "hybrid", "dy", "column", ()),
        ("blockwise", "e4m3", "w", "column", ()),
        ("tensorwise", "hybrid", "dy", "row", ()),
        ("nvfp4", "e2m1", "x", "row", ROWS),
    ],
)
def test_one_compiled_operand_is_the_eager_one(
    scaling: str, format: str, side: str, copy: str, options: tuple[tuple[str, Any], ...]
) -> None:
    quant = quant_of(scaling, format, options=options)
    eager, compiled = (quantizer_of(quant, release=(2, 20), compiled=fast) for fast in (False, True))
    for kind, x in golden.inputs().items():
        found, expected = (operand(one, x, side, copy) for one in (compiled, eager))
        assert torch.equal(found.values, expected.values), kind
        assert (found.alpha is None) is (expected.alpha is None)
        assert found.alpha is None or torch.equal(found.alpha, expected.alpha), kind


def _whether_compiled(x: torch.Tensor) -> torch.Tensor:
    return x + (1.0 if torch.compiler.is_compiling() else 0.0)


@pytest.mark.skipif(kernels.compiler() is not None, reason=str(kernels.compiler()))
def test_a_kernel_is_compiled_in_an_observed_step_too_and_uncompiled_where_tensors_are_not_torchs_own() -> None:
    """The audit watches the first step at dispatch level; torch.compile gives up for good on code that it meets there."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("torch's compiler writes for vector instructions: without them kernels run uncompiled, and say so")

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        pytest.skip("torch 2.6 compiles nothing after a first call with a fake tensor: kernels run uncompiled")

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    call, x = kernels.kernel(_whether_compiled, True, (1, torch.float32)), torch.zeros(4)
    with FakeTensorMode() as fake, Watching():
        assert call(fake.from_tensor(x)).shape == x.shape
    with Watching():
        assert call(x).sum() == 4
    assert call(x).sum() == 4
