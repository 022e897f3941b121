"""Our numerics against Transformer Engine's kernels: quantized tensors element by element, linears by relative difference, FusedAdam over 100 steps."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu



@pytest.fixture(autouse=True)
def _gpu_first(on_gpu):
    # skips before a test's first line can import Transformer Engine
    on_gpu()


DATA = ["normal", "outliers", "wide"]


def tensor(kind: str, rows: int = 256, columns: int = 512):
    import torch

    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, columns, generator=generator)
    if kind == "outliers":
        x[torch.rand(rows, columns, generator=generator) < 1e-3] *= 100
    if kind == "wide":
        x *= torch.exp2(torch.randint(-20, 20, (rows, 1), generator=generator).float())
    return x.bfloat16()


def te_quantized(x, scaling: str, number: str):
    """Transformer Engine's row copy of `x`, dequantized to FP32."""
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex

    dtype = {"e4m3": tex.DType.kFloat8E4M3, "e5m2": tex.DType.kFloat8E5M2}[number]
    if scaling == "tensorwise":
        quantizer = te.Float8CurrentScalingQuantizer(dtype, device=x.device)
    else:
        quantizer = te.Float8BlockQuantizer(fp8_dtype=dtype, rowwise=True, columnwise=False, force_pow_2_scales=True, block_scaling_dim=1)
    import torch

    return quantizer(x).dequantize(dtype=torch.float32)


def ours(x, scaling: str, number: str):
    """Our row copy, dequantized to FP32."""
    from mpbridge.emulation.quantizer import Quantizer
    from mpbridge.precision.policy import Quant

    quant = Quant(format="hybrid" if number == "e5m2" else "e4m3", scaling=scaling)
    quantizer = Quantizer(quant, device=x.device)
    side = "gradient" if number == "e5m2" else "input"
    operand = quantizer.operand(x, slot="probe", gemm="dgrad" if number == "e5m2" else "fprop", side=side)
    return operand.dequantized().float()


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("number", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise"])
def test_quantized_tensors_are_equal_element_by_element(scaling, number, kind, on_gpu):
    import torch

    on_gpu({"tensorwise": "fp8_cs", "blockwise": "fp8_sc"}[scaling])
    x = tensor(kind).cuda()
    assert torch.equal(ours(x, scaling, number), te_quantized(x, scaling, number))


@pytest.mark.parametrize("scaling", ["delayed", "tensorwise", "blockwise"])
def test_emulated_linear_agrees_with_the_real_one(scaling, on_gpu, record_property):
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as te_recipes

    from mpbridge.emulation import emulate_linears
    from mpbridge.precision.policy import PrecisionPolicy, Quant, Region
    from mpbridge.precision.registry import get_mixed_precision_config
    from mpbridge.precision.resolve import resolve

    names = {"delayed": "fp8_ds", "tensorwise": "fp8_cs", "blockwise": "fp8_sc"}
    on_gpu(names[scaling])
    recipe = {
        "delayed": te_recipes.DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent"),
        "tensorwise": te_recipes.Float8CurrentScaling(),
        "blockwise": te_recipes.Float8BlockScaling(fp8_format=te_recipes.Format.HYBRID),
    }[scaling]
    import dataclasses

    policy: PrecisionPolicy = resolve(get_mixed_precision_config("bf16_mixed"))
    policy = dataclasses.replace(policy, regions=(Region(quant=Quant(format="hybrid", scaling=scaling)),))
    real = te.Linear(512, 256, bias=False, params_dtype=torch.bfloat16, device="cuda")
    plain = torch.nn.Sequential(torch.nn.Linear(512, 256, bias=False, device="cuda", dtype=torch.bfloat16))
    with torch.no_grad():
        plain[0].weight.copy_(real.weight)
    emulate_linears(plain, policy)
    x, grad = tensor("outliers").cuda(), tensor("normal", 256, 256).cuda()
    found = []
    for layer, context in ((real, lambda: te.fp8_autocast(enabled=True, fp8_recipe=recipe)), (plain, torch.no_grad)):
        # delayed scaling needs one pass before its scales mean anything
        for _ in range(2):
            a = x.clone().requires_grad_()
            with context() if layer is real else torch.enable_grad():
                out = layer(a)
            layer.zero_grad()
            out.backward(grad)
        weight = next(layer.parameters())
        found.append((out.float(), a.grad.float(), weight.grad.float()))
    for what, t, e in zip(("output", "dgrad", "wgrad"), *found, strict=True):
        difference = float((t - e).norm() / t.norm())
        record_property(f"{scaling} {what}", difference)
        # the operands are the same numbers; what is left is the order of accumulation, and BF16 results
        assert difference < 5e-3, what


@pytest.mark.parametrize(
    ("master", "moments", "remainders"),
    [(False, "float32", False), (True, "float32", False), (True, "float32", True), (True, "bfloat16", True), (True, "float16", False), (True, "uint8", False)],
)
def test_cpu_fused_adam_follows_fused_adam_over_100_steps(master, moments, remainders, on_gpu):
    import torch
    from transformer_engine.pytorch.optimizers import FusedAdam

    from mpbridge.engines.optimizers import CpuFusedAdam

    on_gpu()
    dtype = torch.bfloat16 if master else torch.float32
    start = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    options = {
        "lr": 1e-3, "weight_decay": 0.1, "master_weights": master, "use_decoupled_grad": master, "store_param_remainders": remainders,
        "exp_avg_dtype": getattr(torch, moments), "exp_avg_sq_dtype": getattr(torch, moments),
    }  # fmt: skip
    pair = []
    for cls, device in ((FusedAdam, "cuda"), (CpuFusedAdam, "cpu")):
        parameter = torch.nn.Parameter(start.clone().to(device))
        pair.append((parameter, cls([parameter], **options)))
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        grad = torch.randn(4096, generator=generator)
        for parameter, optimizer in pair:
            value = grad.to(parameter.device)
            if master:
                parameter.decoupled_grad = value
            else:
                parameter.grad = value
            optimizer.step()
    real, stand_in = (parameter.detach().float().cpu() for parameter, _ in pair)
    # one rounding of the parameter's own format may differ where the update lands on a tie; FP8 moments add their own
    spacing = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20}[dtype] * (4 if moments == "uint8" else 1)
    assert torch.all((real - stand_in).abs() <= spacing * real.abs().clamp(min=1e-2))


def test_duplicate_main_copy_of_megatron_fsdp_costs_four_bytes_a_parameter(on_gpu):
    import torch
    from transformer_engine.pytorch.optimizers import FusedAdam

    on_gpu()
    count = 64 * 2**20
    used = []
    for master in (False, True):
        parameter = torch.nn.Parameter(torch.zeros(count, device="cuda"))
        optimizer = FusedAdam([parameter], lr=1e-3, master_weights=master)
        parameter.grad = torch.ones_like(parameter)
        before = torch.cuda.memory_allocated()
        optimizer.step()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated() - before)
        del parameter, optimizer
    assert (used[1] - used[0]) / count == pytest.approx(4.0, rel=0.01)
