"""What the audit reads out of an operand's values, beside quantization written out here from the format's definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpbridge.common.formats import E2M1, E4M3
from mpbridge.observe.audit.operands import LOOKED, is_nearest_e2m1, is_rounded_from, is_rounded_with, patch_of
from mpbridge.observe.audit.products import Products
from mpbridge.precision.regions import Gemms, Quant

CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nvfp4(source: torch.Tensor) -> torch.Tensor:
    """Codes times E4M3 block scales, to nearest: the factor of the whole tensor is left out."""
    blocks = (source * (2688.0 / source.abs().amax())).view(source.shape[0], -1, 16)
    scale = (blocks.abs().amax(2, keepdim=True) / 6.0).to(torch.float8_e4m3fn).float()
    ratio = blocks / scale.clamp_min(1e-30)
    near = CODES[(ratio.abs().clamp_max(6.0).unsqueeze(-1) - CODES).abs().argmin(-1)] * ratio.sign()
    return (near * scale).view(source.shape)


def judged(values: torch.Tensor, source: torch.Tensor) -> bool:
    return is_rounded_from(values, source, E2M1, amax=float(source.abs().amax()), along=16, fitted=True)


@pytest.mark.parametrize("small", [1.0, 1e-4, 3e-6, 1e-6, 1e-7, 1e-20])
def test_blocks_far_below_the_tensors_largest_element_are_no_fault(small: float) -> None:
    source = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    source[8:] *= small  # a gradient that spikes in a few tokens
    assert judged(nvfp4(source), source)


def test_other_values_are_a_fault_beside_such_blocks() -> None:
    source = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    source[8:] *= 1e-7
    wrong = source.clone()
    wrong[0] = wrong[0].roll(1)
    assert not judged(nvfp4(wrong), source)


@pytest.mark.parametrize("small", [1.0, 1e-3, 1e-4, 3e-6, 1e-7])
def test_the_nearest_codes_are_no_fault_and_codes_by_way_of_e4m3_are(small: float) -> None:
    source = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    source[8:] *= small
    scale = 448.0 / source.abs().amax()
    through = (source * scale).to(torch.float8_e4m3fn).float() / scale
    assert is_nearest_e2m1(nvfp4(source), source, across=1)
    assert not is_nearest_e2m1(nvfp4(through), source, across=1)


@pytest.mark.parametrize("change", [lambda x: x * 64, torch.neg, torch.zeros_like])
def test_one_element_that_is_far_off_is_a_fault(change: Any) -> None:
    source = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    amax = float(source.abs().amax())
    codes = (source * (448.0 / amax)).to(torch.float8_e4m3fn).float()
    assert is_rounded_with(codes, source, E4M3, amax=amax, current=True)
    where = int(codes.abs().view(-1).sub(4.0).abs().argmin())
    codes.view(-1)[where] = change(codes.view(-1)[where])
    assert not is_rounded_with(codes, source, E4M3, amax=amax, current=True)


@pytest.mark.parametrize(("shape", "across"), [((4096, 8192), 16), ((1000, 64), 1), ((1000, 64), 128), ((5, 8200), 16)])
def test_a_bounded_number_of_elements_is_judged_in_whole_blocks_elsewhere_each_time(
    shape: tuple[int, int], across: int
) -> None:
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float64).view(shape)
    seen = set()
    for seed in range(300):
        part = patch_of(whole, across=across, seed=seed).of(whole)
        lines, columns = (part[:, 0] // shape[1]).long(), (part[0] % shape[1]).long()
        assert part.numel() <= max(LOOKED, 2 * across * 256)
        assert columns[0] % 128 == 0
        assert columns.numel() % 128 == 0 or columns[-1] == shape[1] - 1
        for line in lines.view(-1)[::across].tolist():
            assert set(range(line // across * across, min(shape[0], line // across * across + across))) <= set(
                lines.tolist()
            )
        seen |= {(int(line) // across, int(columns[0])) for line in lines}
    blocks = -(-shape[0] // across) * -(-shape[1] // 256)
    assert len(seen) > min(blocks, 300) / 2


@pytest.mark.parametrize(
    ("shape", "across", "every"),
    [((256, 1024), 1, 250), ((512, 1024), 16, 1), ((512, 1024), 16, 16), ((64, 1160), 1, 16)],
)
def test_audits_at_any_interval_come_to_every_block(shape: tuple[int, int], across: int, every: int) -> None:
    whole, seen = torch.empty(shape), torch.zeros(shape, dtype=torch.bool)
    for audit in range(3000):
        patch = patch_of(whole, across=across, seed=7 + every * audit)
        seen[patch.lines, patch.columns] = True
    assert bool(seen.all())


def test_audits_keep_every_row_of_the_input_that_wgrad_reads() -> None:
    quant = Quant(format="e4m3", scaling="mxfp8")
    rows, seen = torch.arange(200.0).view(200, 1).expand(200, 32), set()
    for step in range(0, 60 * 250, 250):
        products = Products(lambda path: Gemms(fprop=quant, dgrad=quant, wgrad=quant), seed=step)
        products.enters("linear", rows)
        kept, largest, first = products._xs["linear"][0]
        assert torch.equal(kept, rows[first : first + 64])
        assert largest == 199.0
        seen |= set(kept[:, 0].int().tolist())
    assert seen == set(range(200))


@pytest.mark.parametrize("order", [(True, False), (False, True), (False,)])
def test_a_tied_layer_is_named_only_if_none_of_its_calls_reaches_the_embedding(order: tuple[bool, ...]) -> None:
    products, embedding, head = Products(lambda path: None), torch.nn.Embedding(8, 4), torch.nn.Module()
    head.weight = None
    products.modules, products.embeddings = {"head": head}, {"embedding": embedding}
    for reaches in order:
        weight = embedding.weight if reaches else embedding.weight.detach()
        out = torch.ones(2, 4, requires_grad=True) @ weight.t()
        node = out.grad_fn
        products.attached("head", [node, *(one for one, _ in node.next_functions if one is not None)])
    assert ("head" in products.other) is (True not in order)
