"""FP8 by torchao inside megatron-core's linears, on torch FSDP2: against torchao's own layer, through the audit, refused elsewhere."""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import pytest
import torch

from mpbridge.common.errors import Refused
from mpbridge.common.machines import machine
from mpbridge.planning.capability import ASSUMED, can_run
from mpbridge.precision.registry import describe, recipes
from mpbridge.precision.resolve import resolve
from tests.backend.engines import tiny

RECIPES = {"bf16_with_fp8_rowwise": "rowwise", "bf16_with_fp8_rowwise_gw_hp": "rowwise_with_gw_hp"}


@pytest.fixture
def build(engines: Any) -> Any:
    return engines


@pytest.mark.parametrize("name", RECIPES)
def test_product_and_both_gradients_are_those_of_torchaos_own_layer(name: str) -> None:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    from mpbridge.backend.models.torchao_linears import config_of, multiply

    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    x = (torch.randn(32, 64) * torch.logspace(-3, 3, 32).unsqueeze(1)).to(torch.bfloat16)
    upstream = torch.randn(32, 48).to(torch.bfloat16)
    quant = resolve(recipes[name].make()).quant
    assert quant is not None
    config = config_of(quant, emulate=True)
    expected_config = replace(Float8LinearConfig.from_recipe_name(RECIPES[name]), emulate=True)
    theirs = Float8Linear.from_float(torch.nn.Linear(64, 48, bias=False, dtype=torch.bfloat16), expected_config)
    theirs.load_state_dict(plain.state_dict())
    results = []
    for weight, run in ((plain.weight, lambda one: multiply(config, one, plain.weight)), (theirs.weight, theirs)):
        given = x.clone().requires_grad_()
        y = run(given)
        y.backward(upstream)
        results.append((y, given.grad, weight.grad))
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)
    assert not torch.equal(results[0][0], x @ plain.weight.t())
    exact = upstream.t() @ x
    assert torch.allclose(results[0][2], exact) is (name == "bf16_with_fp8_rowwise_gw_hp")


@pytest.mark.parametrize("name", RECIPES)
def test_an_expert_without_tokens_has_no_rows_and_zero_gradients(name: str) -> None:
    from mpbridge.backend.models.torchao_linears import config_of, multiply

    quant = resolve(recipes[name].make()).quant
    assert quant is not None
    x, weight = torch.zeros(0, 64, dtype=torch.bfloat16, requires_grad=True), torch.randn(48, 64, requires_grad=True)
    y = multiply(config_of(quant, emulate=True), x, weight)
    y.sum().backward()
    assert (y.shape, y.dtype, x.grad.shape) == ((0, 48), torch.bfloat16, (0, 64))  # type: ignore[union-attr]
    assert weight.grad is not None
    assert not weight.grad.count_nonzero()


@pytest.mark.parametrize("name", RECIPES)
def test_the_engine_trains_every_layer_in_it_and_the_audit_agrees(build: Callable[..., Any], name: str) -> None:
    engine = build(name, emulate=True)
    assert engine.engine.name == "fsdp2"
    report, results = tiny.watched(engine, cycle(islice(tiny.batches(), 2)), 6)
    found = {finding.subject: finding.found for finding in report.findings}
    scaling = engine.run.policy.quant.scaling
    assert found["linears"] == f"8 e4m3 {scaling}, 1 high precision"
    # two micro-batches of eight linears: three quantized GEMMs each, or two where the weight's gradient stays in BF16
    assert found["quantized GEMMs"].startswith("32" if scaling.endswith("hp") else "48")
    assert results[-1].loss < results[0].loss - 0.3
    with engine.emulation.paused():
        high = engine.evaluate(tiny.batches(), microbatches=1)
    assert high != engine.evaluate(tiny.batches(), microbatches=1)


def test_the_audit_sees_a_linear_that_lost_its_rule(build: Callable[..., Any]) -> None:
    from mpbridge.observe.audit.examine import audit

    engine = build("bf16_with_fp8_rowwise", emulate=True)
    next(module for module in engine.model[0].modules() if getattr(module, "plug", None) is not None).plug = None
    assert "linears" in {finding.subject for finding in audit(engine.run.policy, engine).findings if not finding.ok}


def test_modules_say_which_linears_stay_high(build: Callable[..., Any]) -> None:
    engine = build({"recipe": "bf16_with_fp8_rowwise", "modules": {"mlp.linear_fc2": "bf16"}}, emulate=True)
    assert len(engine.emulation.plugs) == 6
    assert {name.rpartition(".")[2] for name in engine.emulation.high} == {"linear_fc2"}


@pytest.mark.parametrize("engine", ["mcore", "megatron_fsdp"])
def test_other_engines_refuse_it_and_say_why(build: Callable[..., Any], engine: str) -> None:
    with pytest.raises(Refused, match=r"(?s)scaling-of-a-library-that-the-engine-does-not-use.*engine=fsdp2"):
        build({"recipe": "bf16_with_fp8_rowwise", "params_dtype": "bf16"}, engine=engine, emulate=True)


def test_two_libraries_in_one_run_are_refused(build: Callable[..., Any]) -> None:
    mixed = {
        "recipe": "bf16_with_fp8_rowwise",
        "modules": {"mlp.linear_fc2": {"fp8": "e4m3", "fp8_recipe": "tensorwise"}},
    }
    with pytest.raises(Refused, match="scaling in one run"):
        build(mixed, emulate=True)


def test_it_needs_ada_and_torchao_and_is_never_trained_as_bf16_on_a_cpu(build: Callable[..., Any]) -> None:
    import dataclasses

    policy = resolve(recipes["bf16_with_fp8_rowwise"].make())
    entry = describe("bf16_with_fp8_rowwise")
    assert (entry.needs, entry.engine) == ((8, 9), "fsdp2")
    assert can_run(policy, machine("h100"), ASSUMED).native
    assert "torchao 0.18.0" in can_run(policy, machine("rtx4090"), ASSUMED).reason
    assert not can_run(policy, machine("a100"), ASSUMED).native
    without = can_run(policy, machine("h100"), dataclasses.replace(ASSUMED, torchao=None))
    assert "needs torchao 0.13 or later, and it is not installed" in without.reason
    assert can_run(policy, machine("h100"), dataclasses.replace(ASSUMED, transformer_engine=None)).native
    with pytest.raises(Refused, match="needs a GPU"):
        build("bf16_with_fp8_rowwise")


def test_megatron_core_hears_nothing_of_a_scaling_that_it_has_no_word_for() -> None:
    run = tiny.run("bf16_with_fp8_rowwise")
    assert not {write.field for write in run.plan.writes} & {"fp8", "fp8_recipe", "quant_recipe"}
