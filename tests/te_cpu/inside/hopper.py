"""What holds on a Hopper."""

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import recipe

from mpbridge.training.checkpoint import extra_state

from .gemm_refusals import multiply, quantizer


@pytest.mark.parametrize("made", [recipe.MXFP8BlockScaling, recipe.NVFP4BlockScaling])
def test_recipes_of_later_machines_are_refused_in_transformer_engines_words(made) -> None:
    refused = pytest.raises((AssertionError, RuntimeError), match=r"compute capability 10\.0")
    with refused, te.autocast(enabled=True, recipe=made()):
        pass


def test_a_gemm_without_the_transpose_that_it_needs_fails() -> None:
    rows = quantizer("current", column=False)
    a, b = (rows(torch.randn(number, 64, dtype=torch.bfloat16)) for number in (16, 32))
    y = multiply(a, b)
    wide = b.dequantize(dtype=torch.float32) @ a.dequantize(dtype=torch.float32).t()
    torch.testing.assert_close(y.float(), wide, rtol=2**-8, atol=1e-4)  # the output is rounded to BF16
    with pytest.raises(RuntimeError, match="Input A is missing column-wise usage"):
        multiply(a, rows(torch.randn(32, 16, dtype=torch.bfloat16)), "NN")


def test_a_square_block_has_no_compact_column_copy() -> None:
    made = te.Float8BlockQuantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=2)
    if not hasattr(made, "all_gather_usage"):
        pytest.skip("releases after 2.11 have no compact copies")
    x, made.all_gather_usage = torch.randn(128, 256, dtype=torch.bfloat16), True
    with pytest.raises(RuntimeError, match="Compact columnwise format is not supported for 128x128 2D block scaling"):
        made(x)
    made.set_usage(rowwise=True, columnwise=False)
    rows = made(x)
    made.all_gather_usage = False
    ready = made(x)
    assert torch.equal(rows._rowwise_data, ready._rowwise_data)
    assert torch.equal(rows._rowwise_scale_inv, ready._rowwise_scale_inv)


def test_a_state_from_a_file_sets_no_more_of_a_module_than_its_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """`set_extra_state` updates `fp8_meta` with whatever it is given: recipes and buffers of the module could be replaced by a file's values."""
    monkeypatch.setenv(extra_state.PICKLES_ALLOWED, "1")

    def linear() -> te.Linear:
        torch.manual_seed(7)
        layer = te.Linear(32, 16, params_dtype=torch.bfloat16)
        with te.autocast(enabled=True, recipe=recipe.DelayedScaling(amax_history_len=4)):
            layer(torch.full((16, 32), 3.0, dtype=torch.bfloat16))
        return layer

    data = extra_state.as_data(linear().get_extra_state())
    data["extra_fp8_variables"] |= {"fp8_group": 5, "local_recipes": [1], "buffer_index_and_autocast_key": [0]}
    data["more"] = 1
    other = linear()
    had = dict(other.fp8_meta)
    data["scale_fwd"] = data["scale_fwd"] * 2
    other.set_extra_state(extra_state.as_module(data, None))
    assert torch.equal(other.fp8_meta["scaling_fwd"].scale.cpu(), data["scale_fwd"].cpu())
    assert had.keys() == other.fp8_meta.keys()
    assert other.fp8_meta["fp8_group"] is had["fp8_group"]
    assert other.fp8_meta["num_gemms"] == had["num_gemms"]


def _trained(layer: te.Linear, scaling: recipe.Recipe) -> te.Linear:
    with te.autocast(enabled=True, recipe=scaling):
        layer(torch.full((128, 128), 3.0, dtype=torch.bfloat16)).sum().backward()
    return layer


@pytest.mark.parametrize(
    ("scaling", "before", "after", "gradients", "goes_on"),
    [
        (recipe.Float8BlockScaling, "E4M3", "HYBRID", tex.DType.kFloat8E5M2, False),
        (recipe.Float8BlockScaling, "HYBRID", "HYBRID", tex.DType.kFloat8E5M2, False),
        (recipe.Float8CurrentScaling, "E4M3", "E4M3", tex.DType.kFloat8E4M3, False),
        (recipe.DelayedScaling, "E4M3", "E4M3", tex.DType.kFloat8E4M3, True),
        (recipe.DelayedScaling, "HYBRID", "HYBRID", tex.DType.kFloat8E5M2, True),
        (recipe.DelayedScaling, "HYBRID", "E4M3", tex.DType.kFloat8E4M3, False),
    ],
)
def test_a_loaded_module_quantizes_as_the_run_that_loads_it(
    monkeypatch: pytest.MonkeyPatch, scaling, before, after, gradients, goes_on
) -> None:
    """A module that loads a state keeps the quantizers that it makes then: the recipe object of a state decides their format."""
    monkeypatch.setenv(extra_state.PICKLES_ALLOWED, "1")
    old, new = scaling(fp8_format=recipe.Format[before]), scaling(fp8_format=recipe.Format[after])
    saved, fresh = (te.Linear(128, 128, params_dtype=torch.bfloat16) for _ in range(2))
    data = extra_state.as_data(_trained(saved, old).get_extra_state())
    fresh.set_extra_state(extra_state.as_module(data, fresh.get_extra_state(), format=after.lower()))
    loaded = fresh.fp8_meta.get("scaling_fwd")
    assert (loaded is not None and loaded.amax_history.any()) == goes_on
    assert {quantizer.dtype for quantizer in _trained(fresh, new).quantizers["scaling_bwd"]} == {gradients}


@pytest.mark.parametrize(
    ("kept", "least", "most"), [("float32", 0.9, 1.1), ("bfloat16", 0.9, 1.1), ("uint8", 12_000, 12_200)]
)
def test_an_fp8_second_moment_moves_a_rare_row_by_thousands_of_learning_rates(
    kept: str, least: float, most: float
) -> None:
    """Its entries lie below the largest by more than one scale reaches: the figure in rule second-moment-in-fp8."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.zeros(2, 64))
    how = {"lr": 1.0, "betas": (0.9, 0.95), "weight_decay": 0.0, "exp_avg_sq_dtype": getattr(torch, kept)}
    adam = te.optimizers.FusedAdam([weight], **how)
    moved = 0.0
    for step in range(21):
        weight.grad = torch.randn(2, 64, generator=generator)
        weight.grad[1] *= 1e-4 if step % 10 == 0 else 0.0
        before = weight.detach().clone()
        adam.step()
        moved = max(moved, float((weight.detach() - before)[1].abs().max()))
    assert least < moved < most
