"""Grouped tensors: what is quantized together is what is quantized apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

from mpbridge.errors import Refused
from mpbridge.te_cpu import played
from mpbridge.te_cpu.played import Played, now

ROWS = (128, 0, 384, 256)
"""Rows of the groups; the buffer has 256 more, which belong to none."""
E4M3 = tex.DType.kFloat8E4M3


def current() -> Any:
    return Float8CurrentScalingQuantizer(fp8_dtype=E4M3, device=torch.device("cuda"))


def blocks(dimensions: int) -> Any:
    return Float8BlockQuantizer(fp8_dtype=E4M3, rowwise=True, columnwise=True, block_scaling_dim=dimensions)


def mxfp8(*, columns: bool = True, tiles: bool = False) -> Any:
    made = MXFP8Quantizer(fp8_dtype=E4M3, rowwise=True, columnwise=columns)
    made.optimize_for_gemm = tiles
    return made


def nvfp4(*, tiles: bool = False) -> Any:
    made = NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    made.optimize_for_gemm = tiles
    return made


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


@pytest.mark.since((2, 20))
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


@pytest.mark.since((2, 20))
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
        same(part, make()(own))
    before = out.rowwise_data.clone()
    tex.group_quantize(-x, quantizer, 4, None, output=out, noop_flag=torch.ones(1))
    assert torch.equal(out.rowwise_data, before)
    with pytest.raises(RuntimeError, match="same quantizer"):
        tex.group_quantize(x, make(), 4, None, output=out)


@pytest.mark.since((2, 20))
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


@pytest.mark.since((2, 20))
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
    for part, own, seen in zip(
        wire.split_into_quantized_tensors(),
        torch.split(x[: sum(ROWS)], ROWS),
        torch.split(values[: sum(ROWS)], ROWS),
        strict=True,
    ):
        if len(own):
            first, second = mxfp8(tiles=True)(own), mxfp8(tiles=True)(seen)
            assert torch.equal(part._rowwise_data, first._rowwise_data)
            assert torch.equal(part._rowwise_scale_inv, first._rowwise_scale_inv)
            assert torch.equal(part._columnwise_data, second._columnwise_data)
            assert torch.equal(part._columnwise_scale_inv, second._columnwise_scale_inv)


@pytest.mark.since((2, 20))
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


@pytest.mark.since((2, 20))
@pytest.mark.parametrize(
    ("rows", "message"),
    [((128, 100, 284, 256), "multiple of 128"), ((128, 0, 1024, 0), "end at element 294912"), ((512, 512), "length 4")],
)
def test_groups_that_do_not_fit_are_refused(rows, message) -> None:
    make = mxfp8 if now().blocks_become_mxfp8 else lambda: blocks(1)
    with pytest.raises(RuntimeError, match=message):
        tex.group_quantize(tokens()[0], make(), 4, torch.tensor(rows))


def test_releases_before_have_no_grouped_tensors_here() -> None:
    played.enter(Played(machine=now().machine, release=(2, 19)))
    try:
        with pytest.raises(Refused, match=r"group_quantize .* from release 2\.20 on"):
            tex.group_quantize(tokens()[0], current(), len(ROWS), tokens()[1])
    finally:
        played.leave()


@pytest.mark.since((2, 20))
def test_products_of_grouped_tensors_are_refused_with_the_reason() -> None:
    with pytest.raises(Refused, match=r"cuBLASLt 13\.3 or newer"):
        tex.te_general_grouped_gemm_for_grouped_tensor()
    assert tex.get_cublasLt_version() < 130300
