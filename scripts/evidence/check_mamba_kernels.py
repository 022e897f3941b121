"""Mamba on a CPU against mamba_ssm's own Triton kernels, run by Triton's interpreter: share of equal values and relative distance, forward and backward.

`python scripts/evidence/check_mamba_kernels.py FOLDER` with Triton 3.5 and numpy below 2.1 on PYTHONPATH; FOLDER holds mamba_ssm's Python, as
`MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps --target FOLDER mamba-ssm==2.3.1` leaves it. BF16 is left out: the interpreter
returns zeros for it. The convolution, which is a CUDA extension, is ours on both sides.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime.autotuner import Autotuner

from mpbridge.backend.devices import mamba


def _first(self: Any, *given: Any, **named: Any) -> Any:
    """No timing: an autotuned kernel runs in its first configuration."""
    self.best_config = one = self.configs[0]
    if one.pre_hook:
        one.pre_hook({**dict(zip(self.arg_names, given, strict=False)), **named, **one.all_kwargs()})
    return self.fn.run(*given, **named, **one.kwargs)


def kernels(folder: str) -> Any:
    """mamba_ssm's module of the combined scan. Its package's __init__ imports a CUDA extension: it is entered without running that."""
    package = types.ModuleType("mamba_ssm")
    package.__path__ = [os.path.join(folder, "mamba_ssm")]
    sys.modules["mamba_ssm"] = package
    vars(torch.cuda).update(
        device=lambda *unused: contextlib.nullcontext(),
        get_device_properties=lambda *unused: types.SimpleNamespace(multi_processor_count=4),
    )
    Autotuner.run = _first
    import mamba_ssm.ops.triton.ssd_combined as real

    real.causal_conv1d_fwd_function, real.causal_conv1d_bwd_function = _convolved, _convolved_back
    return real


def _convolved(x: Any, weight: Any, bias: Any, _: Any, __: Any, ___: Any, activated: Any) -> Any:
    return mamba.causal_conv1d_fn(x, weight, bias, activation="silu" if activated else None)


def _convolved_back(x: Any, weight: Any, bias: Any, gradient: Any, *rest: Any) -> Any:
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
        out = _convolved(*inputs, None, None, None, rest[-1])
    return torch.autograd.grad(out, inputs, gradient)


def main() -> None:
    """Prints a row per tensor and dtype."""
    real = kernels(sys.argv[1])
    torch.manual_seed(0)
    heads, channels, groups, states, length = 4, 16, 2, 16, 64
    inner = heads * channels
    width = inner + 2 * groups * states
    for kind in (torch.float32, torch.float16):
        projection = torch.randn(1, length, 2 * inner + 2 * groups * states + heads).to(kind)
        weight, bias = (torch.randn(width, 4) * 0.3).to(kind), (torch.randn(width) * 0.1).to(kind)
        dt_bias, A, D = torch.randn(heads) - 3, -torch.exp(torch.rand(heads) * 2.5), torch.randn(heads).to(kind)
        results = []
        for scan in (real.mamba_split_conv1d_scan_combined, mamba.mamba_split_conv1d_scan_combined):
            inputs = [tensor.clone().requires_grad_() for tensor in (projection, weight, bias, dt_bias, A, D)]
            out = scan(*inputs, chunk_size=32, headdim=channels, ngroups=groups, norm_before_gate=False)
            gradient = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(kind)
            results.append((out.detach(), *torch.autograd.grad(out, inputs, gradient)))
        names = ("y", "zxBCdt", "convolution's weight", "its bias", "dt_bias", "A", "D")
        for name, theirs, ours in zip(names, *results, strict=True):
            far = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
            same = float((ours == theirs).float().mean())
            print(f"{str(kind)[6:]:8} {name:22} distance {far:.1e}  equal {same:.3f}")


if __name__ == "__main__":
    main()
