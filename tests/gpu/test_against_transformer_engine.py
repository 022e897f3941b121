"""Our numerics against Transformer Engine's kernels: quantized tensors element by element, linears by relative difference, FusedAdam over 100 steps.

Each comparison has a half that is ours; those halves run on any machine (the tests without the mark), so that a GPU's hour is not spent on their faults.
"""

from contextlib import nullcontext

import pytest

RECIPE = {"delayed": "fp8_ds", "tensorwise": "fp8_cs", "blockwise": "fp8_sc"}
DATA = ["normal", "outliers", "wide", "zero rows"]
COPIES = [(scaling, number, side, copy) for scaling in RECIPE for number, side, copy in (
    ("e4m3", "x", "row"), ("e4m3", "x", "column"), ("e4m3", "w", "row"), ("e5m2", "dy", "row"), ("e5m2", "dy", "column"),
)]  # fmt: skip
DELAYED_SCALE = 3.25
"""Any scale that is no power of two."""


def here():
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sample(kind: str, rows: int = 256, columns: int = 512):
    """bf16 [rows, columns] on this machine's device, the same everywhere."""
    import torch

    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, columns, generator=generator)
    if kind == "outliers":
        x[torch.rand(rows, columns, generator=generator) < 1e-3] *= 100
    if kind == "wide":
        x *= torch.exp2(torch.randint(-20, 20, (rows, 1), generator=generator).float())
    if kind == "zero rows":
        x[: rows // 2] = 0.0
    return x.bfloat16().to(here())


def ours(x, scaling: str, number: str, side: str, copy: str):
    """Our operand, dequantized to FP32."""
    from mpbridge.numerics.operands import COPY_OF
    from mpbridge.numerics.quantizer import Quantizer, Randomness
    from mpbridge.precision.policy import Quant

    quant = Quant(format="hybrid" if number == "e5m2" else "e4m3", scaling=scaling)
    quantizer = Quantizer(quant, ["probe"], randomness=Randomness(1, x.device), device=x.device, compiled=False)
    for table in (quantizer.forward_table, quantizer.backward_table):
        if table is not None:
            table.scale.fill_(DELAYED_SCALE)
    gemm = next(gemm for (gemm, of), which in COPY_OF.items() if of == side and which == copy)
    return quantizer.operand(x, slot="probe", gemm=gemm, side=side).dequantized()


def theirs(x, scaling: str, number: str, side: str, copy: str):
    """Transformer Engine's, dequantized to FP32."""
    import torch
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    dtype = {"e4m3": tex.DType.kFloat8E4M3, "e5m2": tex.DType.kFloat8E5M2}[number]
    which = {"rowwise": copy == "row", "columnwise": copy == "column"}
    if scaling == "delayed":
        scale, amax = torch.full((1,), DELAYED_SCALE, device=x.device), torch.zeros(1, device=x.device)
        quantizer = Float8Quantizer(scale, amax, dtype)
    elif scaling == "tensorwise":
        quantizer = Float8CurrentScalingQuantizer(dtype, device=x.device)
    else:
        quantizer = Float8BlockQuantizer(dtype, **which, block_scaling_dim=2 if side == "w" else 1)
    return quantizer(x).dequantize(dtype=torch.float32)


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize(("scaling", "number", "side", "copy"), COPIES)
def test_our_quantized_tensors_are_near_what_they_quantize(scaling, number, side, copy, kind):
    x = sample(kind)
    found = ours(x, scaling, number, side, copy)
    assert found.shape == x.shape
    # two or three mantissa bits of what does not saturate or fall below the format, as most of a wide tensor does
    near = (found - x.float()).abs() <= x.float().abs() * (0.13 if number == "e5m2" else 0.07)
    assert near.float().mean() > (0.9 if kind in ("normal", "zero rows") else 0.2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize(("scaling", "number", "side", "copy"), COPIES)
def test_quantized_tensors_are_equal_element_by_element(scaling, number, side, copy, kind, on_gpu):
    import torch

    on_gpu(RECIPE[scaling])
    x = sample(kind)
    assert torch.equal(ours(x, scaling, number, side, copy), theirs(x, scaling, number, side, copy))


def step_of(layer, x, grad, around, begin=lambda: None):
    """(output, input gradient, weight gradient) of the second of two passes: delayed scaling's scales mean something from then on. begin: called before each."""
    for _ in range(2):
        begin()
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        with around():
            out = layer(leaf)
        out.backward(grad)
    weight = next(layer.parameters())
    return [tensor.detach().float() for tensor in (out, leaf.grad, weight.grad)]


def plain_linear(weight):
    import torch

    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=torch.bfloat16)
    with torch.no_grad():
        made.weight.copy_(weight)
    return made


def emulated_linear(scaling: str, weight):
    import dataclasses

    import torch

    from mpbridge.numerics import emulate_linears
    from mpbridge.precision.policy import Quant, Region
    from mpbridge.precision.registry import get_mixed_precision_config
    from mpbridge.precision.resolve import resolve

    plain = torch.nn.Sequential(plain_linear(weight))
    more = {"amax_history": 1, "amax_algo": "most_recent"} if scaling == "delayed" else {}
    policy = resolve(get_mixed_precision_config("bf16_mixed"))
    regions = (Region(quant=Quant(format="hybrid", scaling=scaling, **more)),)
    return plain, emulate_linears(plain, dataclasses.replace(policy, regions=regions))


@pytest.mark.parametrize("scaling", RECIPE)
def test_our_emulated_linear_is_near_the_plain_one(scaling):
    weight = sample("normal", 256, 512) / 16
    plain = plain_linear(weight)
    x, grad = sample("normal"), sample("normal", 256, 256)
    emulated, emulation = emulated_linear(scaling, weight)
    found = step_of(emulated, x, grad, nullcontext, emulation.step_begin)
    for e, p in zip(found, step_of(plain, x, grad, nullcontext), strict=True):
        assert 1e-4 < float((e - p).norm() / p.norm()) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", RECIPE)
def test_emulated_linear_agrees_with_the_real_one(scaling, on_gpu, record_property):
    on_gpu(RECIPE[scaling])
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as te_recipes

    recipe = {
        "delayed": te_recipes.DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent"),
        "tensorwise": te_recipes.Float8CurrentScaling(),
        "blockwise": te_recipes.Float8BlockScaling(fp8_format=te_recipes.Format.HYBRID),
    }[scaling]
    real = te.Linear(512, 256, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x, grad = sample("outliers"), sample("normal", 256, 256)
    theirs = step_of(real, x, grad, lambda: te.fp8_autocast(enabled=True, fp8_recipe=recipe))
    emulated, emulation = emulated_linear(scaling, real.weight.detach())
    found = step_of(emulated, x, grad, nullcontext, emulation.step_begin)
    for what, t, e in zip(("output", "dgrad", "wgrad"), theirs, found, strict=True):
        difference = float((t - e).norm() / t.norm())
        record_property(f"{scaling} {what}", difference)
        # the operands are the same numbers; what is left is the order of accumulation, and BF16 results
        assert difference < 5e-3, what


STATES = pytest.mark.parametrize(
    ("master", "moments", "remainders"),
    [(False, "float32", False), (True, "float32", False), (True, "float32", True), (True, "bfloat16", True), (True, "float16", False), (True, "uint8", False)],
)  # fmt: skip


def after_100_steps(cls, device, master: bool, moments: str, remainders: bool):
    """The parameter as `cls` leaves it, in FP32 on the CPU."""
    import torch

    dtype = torch.bfloat16 if master else torch.float32
    options = {
        "lr": 1e-3, "weight_decay": 0.1, "master_weights": master, "use_decoupled_grad": master, "store_param_remainders": remainders,
        "exp_avg_dtype": getattr(torch, moments), "exp_avg_sq_dtype": getattr(torch, moments),
    }  # fmt: skip
    parameter = torch.nn.Parameter(torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype).to(device))
    optimizer, generator = cls([parameter], **options), torch.Generator().manual_seed(1)
    for _ in range(100):
        setattr(parameter, "decoupled_grad" if master else "grad", torch.randn(4096, generator=generator).to(device))
        optimizer.step()
    return parameter.detach().float().cpu()


@STATES
def test_cpu_fused_adam_stays_near_torchs_over_100_steps(master, moments, remainders):
    import torch

    from mpbridge.backend.engines.optimizers import CpuFusedAdam

    found = after_100_steps(CpuFusedAdam, "cpu", master, moments, remainders)
    start = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    parameter = torch.nn.Parameter(start.to(torch.bfloat16 if master else torch.float32).float())
    reference, generator = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1), torch.Generator().manual_seed(1)
    for _ in range(100):
        parameter.grad = torch.randn(4096, generator=generator)
        reference.step()
    apart = (found - parameter.detach()).abs()
    # the parameter's own rounding, and for narrow moments a tenth of what 100 steps can move
    assert torch.all(apart <= 2.0**-8 * parameter.detach().abs() + (1e-2 if moments != "float32" else 1e-6))


@pytest.mark.gpu
@STATES
def test_cpu_fused_adam_follows_fused_adam_over_100_steps(master, moments, remainders, on_gpu):
    on_gpu()
    import torch
    from transformer_engine.pytorch.optimizers import FusedAdam

    from mpbridge.backend.engines.optimizers import CpuFusedAdam

    real = after_100_steps(FusedAdam, "cuda", master, moments, remainders)
    stand_in = after_100_steps(CpuFusedAdam, "cpu", master, moments, remainders)
    # a BF16 parameter may be rounded to the other neighbour; in FP32 each of 100 updates differs by 2**-22 (optimizers._Plain); FP8 moments add their own
    spacing = (2.0**-7 if master else 100 * 2.0**-22) * (4 if moments == "uint8" else 1)
    assert torch.all((real - stand_in).abs() <= spacing * real.abs().clamp(min=1e-2))


def first_update(gpu_run, *, duplicate: bool) -> tuple[int, int]:
    """(bytes that the first update of a Megatron-FSDP run allocates for states, parameters); duplicate: with the second main copy of megatron-core 0.16.1."""
    import torch

    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.optimizers import CpuFusedAdam
    from mpbridge.backend.engines.registry import build_engine
    from mpbridge.backend.engines.shard_optimizer import fused_adam
    from tests.gpu.feed import batches

    run, cuda = gpu_run("bf16_megatron_fsdp", "engine=megatron_fsdp"), torch.cuda.is_available()
    with device_layer(cuda, fused_adam=CpuFusedAdam):
        engine = build_engine(run)
        try:
            optimizer = engine.optimizer
            kind = fused_adam(cuda)
            optimizer.parts = [kind(part.param_groups, lr=1e-3, master_weights=duplicate) for part in optimizer.parts]
            engine.train_step(batches(run), microbatches=1)
            states = [value for part in optimizer.parts for state in part.state.values() for value in state.values()]
            held = sum(value.untyped_storage().nbytes() for value in states if isinstance(value, torch.Tensor))
            return held, sum(shard.numel() for shard in optimizer.shards.values())
        finally:
            engine.close()


def test_a_duplicate_main_copy_under_megatron_fsdp_costs_four_bytes_a_parameter(gpu_run, world):
    honest, count = first_update(gpu_run, duplicate=False)
    planted, _ = first_update(gpu_run, duplicate=True)
    assert honest / count == pytest.approx(8.0, rel=0.01), "two FP32 moments"
    assert (planted - honest) / count == pytest.approx(4.0, rel=0.01)
