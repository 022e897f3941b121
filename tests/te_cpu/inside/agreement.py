"""`--emulate` against `--emulate te`, linear by linear: the same weights, inputs and output gradients (scripts/evidence/te_agreement.py)."""

import importlib

import pytest
import torch
import transformer_engine_torch as tex

from mpbridge.te_cpu.played import now
from tests.conftest import OLD

from .training import BLACKWELL, BLOCKWISE, DELAYED, MXFP8, NVFP4, TENSORWISE

RECIPES = (MXFP8, NVFP4) if BLACKWELL else (TENSORWISE, DELAYED, BLOCKWISE)


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("scripts.evidence.te_agreement")


@pytest.fixture(scope="module", autouse=True)
def world():
    from mpbridge.training.process import process_group

    with process_group(False):
        yield


@pytest.fixture(autouse=True)
def no_other_random_numbers(monkeypatch):
    """Stochastic rounding draws others in each realization."""
    from transformer_engine.common import recipe

    monkeypatch.setenv("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1")  # the emulation reads it when it is built
    original = recipe.NVFP4BlockScaling.__post_init__

    def to_nearest(made) -> None:
        made.disable_stochastic_rounding = True
        original(made)

    monkeypatch.setattr(recipe.NVFP4BlockScaling, "__post_init__", to_nearest)


def played() -> dict[str, str]:
    return {"machine": now().machine.name.lower(), "te": ".".join(map(str, now().release[:2]))}


@pytest.mark.skipif(
    OLD, reason="torch 2.6's rms_norm rounds to BF16 before its weight multiplies, Transformer Engine's once behind it"
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_linear_is_the_same_but_for_the_order_of_fp32_sums(recipe, script) -> None:
    steps = 2 if recipe == DELAYED else 1  # its scales are of the step before
    rows = script.compared(recipe, steps=steps, **played())
    assert {row["tensor"] for row in rows} == {"y", "dx", "dw"}
    assert [row for row in rows if row["beyond"]] == []
    assert sum(row["elements"] for row in rows) > 1e6
    # one rounding to BF16 that falls the other way in a thousand would mean other operands, not another order
    assert sum(row["different"] for row in rows) < 1e-3 * sum(row["elements"] for row in rows)


def test_another_recipe_is_beyond_the_bound(script, monkeypatch) -> None:
    """What the comparison finds when the two do not do the same."""
    real, (recipe, *_, other) = script.resolved, RECIPES
    monkeypatch.setattr(
        script, "resolved", lambda name, emulate, **more: real(name if emulate == "te" else other, emulate, **more)
    )
    rows = script.compared(recipe, steps=1, **played())
    assert all(row["beyond"] for row in rows if row["tensor"] == "y")


def test_the_norms_backward_spreads_an_error_of_the_linears_input_gradient(script) -> None:
    """Two orders of the same sums give BF16 neighbours in a few places; a small input and a gradient along it make that more than a spacing of dx."""
    random = torch.Generator().manual_seed(0)
    tokens, features, outputs = 512, 256, 1024
    x = (torch.randn(1, features, generator=random) * 0.05 + torch.zeros(tokens, 1)).bfloat16()
    gain = torch.ones(features, dtype=torch.bfloat16)
    dy = torch.randn(tokens, outputs, generator=random).bfloat16()
    w = (torch.randn(outputs, 1, generator=random) * x[:1].float()).bfloat16()

    def gradient(order: range) -> torch.Tensor:
        total = torch.zeros(tokens, features)
        for k in order:
            total += dy[:, k : k + 1].float() * w[k].float()
        return total.bfloat16()

    one, other = gradient(range(outputs)), gradient(range(outputs - 1, -1, -1))
    wide = x.float()
    inverse = (wide.square().mean(1) + 1e-5).rsqrt()
    a = tex.rmsnorm_bwd(one, x, inverse, gain)[0].double()
    leaf = x.clone().requires_grad_()
    torch.nn.functional.rms_norm(leaf, [features], gain, 1e-5).backward(other)
    b = leaf.grad.double()

    norm = script.Norm(x.double(), gain.double())
    apart, spacing = (a - b).abs(), script.spacing_of(torch.maximum(a.abs(), b.abs()))
    operands = (norm.output().bfloat16().double(), w.double(), dy.double())
    assert (apart <= spacing + script.bound_of("dx", *operands, norm)[0]).all()
    # without the norm, the bound of the linear's input gradient alone is too small
    assert (apart > spacing + script.bound_of("dx", *operands)[0]).any()
