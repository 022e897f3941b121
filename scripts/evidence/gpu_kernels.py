"""Transformer Engine's kernels against those that play them on a CPU: the same calls of its Python, once on each, compared byte by byte.

    python scripts/evidence/gpu_kernels.py --write real.pt                                              on a GPU
    mpbridge on-cpu --target h100 scripts/evidence/gpu_kernels.py --write played.pt                     on a CPU
    python scripts/evidence/gpu_kernels.py --compare real.pt played.pt

Quantized operands must agree in every byte. Outputs and gradients of a linear are sums in another order: their largest difference, relative to the largest
value, is shown beside the share that is equal. Exit code 1: an operand differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch

KINDS = ("normal", "outliers", "wide", "zero rows")


def sample(kind: str, rows: int = 256, columns: int = 512) -> torch.Tensor:
    """bf16 [rows, columns] on the GPU, the same on every machine."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(7))
    if kind == "outliers":
        x[::17, ::13] *= 1000.0
    elif kind == "wide":
        x *= torch.exp2(torch.linspace(-40, 40, columns))
    elif kind == "zero rows":
        x[:128] = 0.0
    return x.to(torch.bfloat16).cuda()


def quantizers() -> Iterator[tuple[str, Any]]:
    """(name, quantizer) of every scaling that this GPU has."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    for word, number in (("e4m3", tex.DType.kFloat8E4M3), ("e5m2", tex.DType.kFloat8E5M2)):
        scale, amax = torch.full((1,), 3.25, device="cuda"), torch.zeros(1, device="cuda")
        yield f"delayed {word}", Float8Quantizer(scale, amax, number)
        yield f"tensorwise {word}", Float8CurrentScalingQuantizer(number, device=torch.device("cuda"))
        for dimensions in (1, 2):
            both = {"rowwise": True, "columnwise": True, "block_scaling_dim": dimensions}
            yield f"blockwise {word} {dimensions}-D", Float8BlockQuantizer(number, **both)
        if torch.cuda.get_device_capability()[0] >= 10:
            from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

            yield f"mxfp8 {word}", MXFP8Quantizer(number, rowwise=True, columnwise=True)
    if torch.cuda.get_device_capability()[0] >= 10:
        from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

        yield "nvfp4", NVFP4Quantizer(rowwise=True, columnwise=True)


def recipes() -> Iterator[tuple[str, Any]]:
    """(name, Transformer Engine's recipe) of every scaling that this GPU has."""
    from transformer_engine.common import recipe

    yield "delayed", recipe.DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")
    yield "tensorwise", recipe.Float8CurrentScaling()
    yield "blockwise", recipe.Float8BlockScaling(fp8_format=recipe.Format.HYBRID)
    if torch.cuda.get_device_capability()[0] >= 10:
        yield "mxfp8", recipe.MXFP8BlockScaling()


def measured() -> dict[str, torch.Tensor]:
    """Name -> tensor on the CPU: 'operand ...' are codes and scales as bytes, 'sum ...' FP32 results of a LayerNormLinear, a Linear and FusedAdam."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.optimizers import FusedAdam

    found: dict[str, torch.Tensor] = {}
    for kind in KINDS:
        for name, quantizer in quantizers():
            for part, value in sorted(vars(quantizer(sample(kind))).items()):
                if isinstance(value, torch.Tensor) and value.numel() and value.dtype in (torch.uint8, torch.float32):
                    found[f"operand {name}, {kind}, {part.strip('_')}"] = value.detach().contiguous().view(torch.uint8).cpu()  # fmt: skip
    for name, recipe in recipes():
        for module in (te.Linear, te.LayerNormLinear):
            layer = module(512, 256, bias=False, params_dtype=torch.bfloat16, device="cuda")
            with torch.no_grad():
                layer.weight.copy_(sample("normal") / 16)
            x = sample("normal").requires_grad_()
            with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                y = layer(x)
            y.backward(sample("normal", 256, 256))
            parts = {"output": y, "input gradient": x.grad, "weight gradient": layer.weight.grad}
            found |= {f"sum {module.__name__} {name}, {part}": value.detach().float().cpu() for part, value in parts.items()}  # fmt: skip
    parameter = torch.nn.Parameter(sample("normal").float())
    optimizer = FusedAdam([parameter], lr=1e-3, weight_decay=0.1)
    for _ in range(10):
        parameter.grad = sample("outliers").float()
        optimizer.step()
    found["sum FusedAdam, weights after 10 steps"] = parameter.detach().cpu()
    return found


def compare(real: dict[str, torch.Tensor], played: dict[str, torch.Tensor]) -> int:
    """Prints one line for each group of operands and each sum; 1 if a byte of an operand differs or one side lacks something."""
    wrong = sorted(set(real) ^ set(played))
    print("".join(f"only on one side: {name}\n" for name in wrong), end="")
    groups: dict[str, list[int]] = {}
    for name in sorted(set(real) & set(played)):
        a, b = real[name], played[name]
        if a.shape != b.shape:
            wrong.append(name)
            print(f"{name}: {tuple(a.shape)} against {tuple(b.shape)}")
        elif name.startswith("operand"):
            count = groups.setdefault(name.partition(",")[0], [0, 0])
            count[0] += int((a == b).sum())
            count[1] += a.numel()
        else:
            print(f"{name}: {float((a == b).float().mean()):.2%} equal, largest difference {float((a - b).abs().max() / a.abs().max()):.1e}")  # fmt: skip
    for name, (equal, total) in groups.items():
        print(f"{name}: {equal} of {total} bytes equal")
    return int(bool(wrong) or any(equal != total for equal, total in groups.values()))


def main() -> int:
    """Writes or compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", metavar="FILE")
    what.add_argument("--compare", nargs=2, metavar="FILE")
    args = parser.parse_args()
    if args.write:
        found = measured()
        torch.save(found, args.write)
        print(f"{len(found)} tensors of {torch.cuda.get_device_name()}")
        return 0
    return compare(*(torch.load(file, weights_only=True) for file in args.compare))


if __name__ == "__main__":
    sys.exit(main())
