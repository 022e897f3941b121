"""Grouped tensors: what is quantized together is what is quantized apart."""

import importlib
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common.recipe import (  # fmt: skip
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

from mpbridge.te_cpu.played import now

from .gemm_refusals import E4M3, quantizer

ROWS = (128, 0, 384, 256)
"""Rows of the groups; the buffer has 256 more, which belong to none."""
pytestmark = pytest.mark.since((2, 20))


def current() -> Any:
    return quantizer("current")


def blocks(dimensions: int) -> Any:
    return Float8BlockQuantizer(fp8_dtype=E4M3, rowwise=True, columnwise=True, block_scaling_dim=dimensions)


def mxfp8(*, columns: bool = True, tiles: bool = False) -> Any:
    return quantizer("mxfp8", column=columns, tiles=tiles)


def nvfp4(*, tiles: bool = False) -> Any:
    return quantizer("nvfp4", tiles=tiles, with_rht=True, with_post_rht_amax=True)


QUANTIZERS = [
    pytest.param(current, id="current"),
    pytest.param(lambda: blocks(1), id="blocks", marks=pytest.mark.played("hopper")),
    pytest.param(lambda: blocks(2), id="square blocks", marks=pytest.mark.played("hopper")),
    pytest.param(mxfp8, id="mxfp8", marks=pytest.mark.played("blackwell")),
    pytest.param(lambda: mxfp8(tiles=True), id="mxfp8 in tiles", marks=pytest.mark.played("blackwell")),
    pytest.param(nvfp4, id="nvfp4", marks=pytest.mark.played("blackwell")),
    pytest.param(lambda: nvfp4(tiles=True), id="nvfp4 in tiles", marks=pytest.mark.played("blackwell")),
]
BUFFERS = (
    "_data", "_transpose", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv",
    "_amax_rowwise", "_amax_columnwise",
)  # fmt: skip


def tokens(rows: int = sum(ROWS) + 256) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    # every group has a scale of its own
    return (torch.randn(rows, 256) * torch.linspace(1, 9, rows).unsqueeze(1)).bfloat16(), torch.tensor(ROWS)


def same(made: Any, apart: Any) -> int:
    """How many buffers two quantized tensors have in common; every one is equal."""
    common = [name for name in BUFFERS if getattr(apart, name, None) is not None]
    for name in common:
        ours, theirs = getattr(made, name), getattr(apart, name)
        assert torch.equal(ours.reshape(-1).float(), theirs.reshape(-1).float()), name
    return len(common)


@pytest.mark.parametrize("make", QUANTIZERS)
def test_groups_are_quantized_as_their_rows_alone(make) -> None:
    x, rows = tokens()
    together = tex.group_quantize(x, make(), len(ROWS), rows)
    parts = together.split_into_quantized_tensors()
    for part, own in zip(parts, torch.split(x[: sum(ROWS)], ROWS), strict=True):
        if len(own):
            assert same(part, make()(own)) >= 2
    codes = [copy for copy in (together.rowwise_data, together.columnwise_data) if copy is not None]
    used = len(codes[0]) * sum(ROWS) // len(x)
    assert codes
    assert all(copy[:used].count_nonzero() for copy in codes)
    assert not any(copy[used:].count_nonzero() for copy in codes)


@pytest.mark.parametrize("make", QUANTIZERS[:3] + QUANTIZERS[3:5])
def test_groups_of_one_shape_are_written_into_the_same_buffers_again(make) -> None:
    x = tokens(512)[0]
    quantizer = make()
    out = tex.group_quantize(x, quantizer, 4, None)
    places = [copy.data_ptr() for copy in (out.rowwise_data, out.columnwise_data) if copy is not None]
    again = tex.group_quantize(x * 3, quantizer, 4, None, output=out)
    assert again is out
    assert places == [copy.data_ptr() for copy in (out.rowwise_data, out.columnwise_data) if copy is not None]
    for part, own in zip(out.split_into_quantized_tensors(), torch.split(x * 3, 128), strict=True):
        assert same(part, make()(own)) >= 2
    before = out.rowwise_data.clone()
    tex.group_quantize(-x, quantizer, 4, None, output=out, noop_flag=torch.ones(1))
    assert torch.equal(out.rowwise_data, before)
    with pytest.raises(RuntimeError, match="same quantizer"):
        tex.group_quantize(x, make(), 4, None, output=out)


@pytest.mark.parametrize("make", QUANTIZERS[1:4])
def test_values_of_groups_and_sums_over_their_rows(make) -> None:
    x, rows = tokens()
    quantizer = make()
    made, sums = tex.bgrad_group_quantize(x, quantizer, len(ROWS), rows)
    for total, own in zip(sums, torch.split(x[: sum(ROWS)], ROWS), strict=True):
        assert torch.equal(total, own.float().sum(0).bfloat16())
    quantizer.set_usage(rowwise=True, columnwise=False)
    made = tex.group_quantize(x, quantizer, len(ROWS), rows)
    values = tex.group_dequantize(made, tex.DType.kBFloat16).rowwise_data.view(x.shape)
    for at, own in zip(torch.split(values[: sum(ROWS)], ROWS), torch.split(x[: sum(ROWS)], ROWS), strict=True):
        if len(own):
            assert torch.equal(at, quantizer(own).dequantize())


@pytest.mark.played("blackwell")
@pytest.mark.parametrize("fused", ["1", "0"])
def test_a_row_copy_that_arrived_alone_is_made_ready_for_gemms(fused, monkeypatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_GROUP_REQUANTIZE", fused)
    x, rows = tokens()
    wire = tex.group_quantize(x, mxfp8(columns=False), len(ROWS), rows)
    values = tex.group_dequantize(wire, tex.DType.kBFloat16).rowwise_data.view(x.shape)
    capacity, ready = wire.scale_inv.shape, mxfp8(tiles=True)
    given = tex.group_requantize_inplace(wire, ready, len(ROWS), rows, tex.DType.kBFloat16, return_dequantized=True)
    assert torch.equal(given, values)
    assert wire.scale_inv.shape == capacity
    assert wire._with_gemm_swizzled_scales
    assert ready.rowwise_usage is (fused == "1")
    parts, rowwise, columnwise = wire.split_into_quantized_tensors(), x[: sum(ROWS)], values[: sum(ROWS)]
    for part, own, seen in zip(parts, torch.split(rowwise, ROWS), torch.split(columnwise, ROWS), strict=True):
        if len(own):
            for copy, made in (("_rowwise", mxfp8(tiles=True)(own)), ("_columnwise", mxfp8(tiles=True)(seen))):
                assert torch.equal(getattr(part, f"{copy}_data"), getattr(made, f"{copy}_data"))
                assert torch.equal(getattr(part, f"{copy}_scale_inv"), getattr(made, f"{copy}_scale_inv"))


@pytest.mark.played("blackwell")
def test_amaxes_that_are_known_are_used_and_kept() -> None:
    x, rows = tokens()
    free = tex.group_quantize(x, nvfp4(), len(ROWS), rows)
    row, column = free.amax * 1.5, free.columnwise_amax * 1.5
    made = tex.nvfp4_group_quantize_with_amax(x, nvfp4(), len(ROWS), rows, rowwise_amax=row, columnwise_amax=column)
    assert made.amax is row
    assert made.columnwise_amax is column
    assert not torch.equal(made.rowwise_data, free.rowwise_data)
    own = x[: ROWS[0]]
    alone = tex.nvfp4_quantize_with_amax(own, nvfp4(), row[:1], column[:1])
    assert same(made.split_into_quantized_tensors()[0], alone) == 6


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((128, 100, 284, 256), "divisible by 128, found 100"),
        ((128, 0, 1024, 0), "end at element 294912"),
        ((512, 512), "length 4"),
    ],
)
def test_groups_that_do_not_fit_are_refused(rows, message) -> None:
    make = mxfp8 if now().blocks_become_mxfp8 else lambda: blocks(1)
    with pytest.raises(RuntimeError, match=message):
        tex.group_quantize(tokens()[0], make(), 4, torch.tensor(rows))


RECIPES = [
    pytest.param(None, id="bf16"),
    pytest.param(Float8CurrentScaling, id="current"),
    pytest.param(Float8BlockScaling, id="blocks", marks=pytest.mark.played("hopper")),
    pytest.param(MXFP8BlockScaling, id="mxfp8", marks=pytest.mark.played("blackwell")),
    pytest.param(lambda: NVFP4BlockScaling(disable_stochastic_rounding=True), id="nvfp4", marks=pytest.mark.played("blackwell")),
]  # fmt: skip


@pytest.mark.parametrize("make", RECIPES)
def test_a_grouped_linear_computes_the_same_from_grouped_tensors(make, monkeypatch) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    x, rows = tokens(sum(ROWS))
    results = []
    together, one_weight = {"use_grouped_tensor": True}, {"use_grouped_tensor": True, "single_grouped_weight": True}
    # the grouped kernel takes no NVFP4 weights: they have square blocks, or no Hadamard transform
    for options in ({}, together, together if make and make().nvfp4() else one_weight):
        torch.manual_seed(1)
        layer = te.GroupedLinear(len(ROWS), 256, 128, bias=True, params_dtype=torch.bfloat16, device="cuda", **options)
        given = x.clone().requires_grad_()
        with te.autocast(enabled=make is not None, recipe=make and make()):
            out = layer(given, rows)
        out.backward(torch.ones_like(out) * 0.5)
        single = "single_grouped_weight" in options
        weights = [layer.weight] if single else [getattr(layer, f"weight{i}") for i in range(len(ROWS))]
        gradient = torch.cat([weight.grad.reshape(-1, 256) for weight in weights])
        results.append((out.detach(), given.grad, gradient))
    # a bias is added to the rounded product here, and before rounding there
    ulp = 2.0**-8 * 2
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            assert float((one - other).abs().max()) <= ulp * float(other.abs().max())
    for one, other in zip(results[1], results[2], strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def storage() -> Any:
    module = importlib.import_module("transformer_engine.pytorch.tensor.storage.grouped_tensor_storage")
    return module.GroupedTensorStorage


def test_a_bias_is_added_to_rounded_products_once_per_row(storage) -> None:
    x, rows = tokens(sum(ROWS))
    weights = [torch.randn(128, 256, dtype=torch.bfloat16) for _ in ROWS]
    scale, bias = torch.rand(len(x)), torch.randn(len(ROWS), 128, dtype=torch.bfloat16)
    number = len(ROWS) if now().capability >= (10, 0) else 1

    def grouped(data: torch.Tensor, sizes: torch.Tensor | None) -> Any:
        offsets = None if sizes is None else tex.splits_to_offsets(sizes, data.shape[1])
        return storage(
            shape=tuple(data.shape), dtype=data.dtype, num_tensors=len(ROWS), data=data.reshape(-1), first_dims=sizes, tensor_offsets=offsets
        )  # fmt: skip

    out = torch.ones(len(x), 128, dtype=torch.bfloat16)
    tex.te_general_grouped_gemm_for_discrete_in(
        weights, True, grouped(x, rows), False, grouped(out, rows), grouped(bias, None), scale,
        torch.full((number,), 2.0), torch.full((number,), 0.5), None, None, False, 0,
    )  # fmt: skip
    start = 0
    for i, size in enumerate(ROWS):
        own = slice(start, start + size)
        product = (2 * (x[own].float() @ weights[i].float().t()) + 0.5).bfloat16()
        expected = (product.double() + scale[own].unsqueeze(1).double() * bias[i].double()).float().bfloat16()
        assert torch.equal(out[own], expected)
        start += size
    given = grouped(x, rows), False, grouped(out, rows)
    with pytest.raises(RuntimeError, match=f"alpha must have {number} element"):
        tex.te_general_grouped_gemm_for_discrete_in(weights, True, *given, None, None, torch.ones(3), torch.zeros(3))


@pytest.mark.played("blackwell")
def test_groups_of_one_shape_that_fill_no_tiles_share_their_scales_as_one_tensor(storage) -> None:
    """MXFP8 weights of 96 rows: [4 x 96, 256] is quantized as a whole, and a GEMM pads each one's scales."""
    x = tokens(4 * 96)[0]
    made = tex.group_quantize(x, mxfp8(), 4, None)
    assert torch.equal(made.scale_inv.view(-1, 8), mxfp8()(x)._rowwise_scale_inv)
    values = torch.split(mxfp8(columns=False)(x).dequantize(), 96)
    inputs = torch.randn(4 * 128, 256, dtype=torch.bfloat16)
    products = storage(
        shape=(512, 96), dtype=torch.float32, num_tensors=4, data=torch.zeros(512 * 96), shapes=[(128, 96)] * 4
    )
    groups = tex.group_quantize(inputs, mxfp8(tiles=True), 4, None)
    tex.te_general_grouped_gemm_for_grouped_tensor(
        made, True, groups, False, products, None, None, torch.ones(4), torch.zeros(4)
    )
    seen = torch.split(mxfp8(columns=False)(inputs).dequantize(), 128)
    for got, left, right in zip(products.split_into_quantized_tensors(), seen, values, strict=True):
        torch.testing.assert_close(got, left.float() @ right.float().t(), rtol=1e-5, atol=1e-4)
    tex.grouped_swizzle_for_gemm(made, True, False)
    assert made.scale_inv.shape == (4 * 128, 8)
    assert made.columnwise_scale_inv is None


@pytest.mark.played("blackwell")
def test_the_statistics_see_every_gemm_of_grouped_tensors() -> None:
    from types import SimpleNamespace

    from mpbridge.observe.telemetry.native import Tap
    from mpbridge.precision.registry import get_mixed_precision_config
    from mpbridge.precision.resolve import resolve

    quant = resolve(get_mixed_precision_config("bf16_with_mxfp8_mixed")).quant
    probe: Any = SimpleNamespace(inside=None, gradients=None, sources=[])
    noise: Any = SimpleNamespace(note=lambda *one: None)
    gemms: Any = SimpleNamespace(fprop=quant, dgrad=quant, wgrad=quant)
    tap = Tap(probe, noise, lambda path: gemms)
    how = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda", "use_grouped_tensor": True}
    layer = te.GroupedLinear(len(ROWS), 256, 128, **how)
    x, rows = tokens(sum(ROWS))
    x.requires_grad_()
    tap.start()
    try:
        probe.inside = "experts"
        with te.autocast(enabled=True, recipe=MXFP8BlockScaling()):
            out = layer(x, rows)
        probe.inside, probe.gradients = None, "experts"
        out.backward(torch.ones_like(out))
    finally:
        tap.stop()
    seen = {gemm for one in tap.found.values() for gemm in one["gemms"]}
    assert seen == {"fprop", "dgrad", "wgrad"}, (tap.found.keys(), tap.unread)
    assert {name for name, _, _ in tap.found} == {f"experts.{i}" for i in range(len(ROWS))}
    assert tap.unread == {}
