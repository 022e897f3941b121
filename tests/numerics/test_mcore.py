"""Emulation in real megatron-core models: every recipe, experts, recomputation, checkpoints, and two-process layouts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpbridge.backend.engines.registry import EmulatedEngine, build_engine
from mpbridge.backend.megatron.emulated_linears import emulation_for
from mpbridge.precision.registry import get_mixed_precision_config, recipes
from mpbridge.precision.resolve import resolve
from tests.backend.engines import tiny
from tests.numerics import worker
from tests.numerics.worker import MOE
from tests.observe.audit.faults import after

# recipes for another engine have another library's linears (tests/backend/models/test_torchao_linears.py)
OURS = [name for name, entry in recipes.items() if entry.engine is None]
QUANTIZED = [name for name in OURS if resolve(get_mixed_precision_config(name)).quantized]
SHORT = {
    "delayed": "bf16_with_fp8_delayed_scaling_mixed", "tensorwise": "bf16_with_fp8_current_scaling_mixed", "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}  # fmt: skip


@pytest.fixture
def build(layer: None, world: None) -> Any:
    engines: list[Any] = []

    def make(kind: Any, **settings: Any) -> Any:
        engines.append(build_engine(tiny.run(kind, emulate=settings.pop("emulate", True), **settings)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_every_linear_follows_the_rule_of_its_path(build: Any) -> None:
    fields = {"bf16": True, "fp8": "hybrid", "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 0}  # fmt: skip
    modules = {
        "mlp.experts.linear_fc1": {"layers": "last 1", "fprop": "nvfp4", "dgrad": "mxfp8", "wgrad": "bf16"},
        "decoder.layers.1.self_attention.*": "bf16",
        "mtp.*.linear_qkv": "mxfp8",
        "eh_proj": "bf16",
    }
    engine = build(fields | {"modules": modules}, model={"num_layers": 3, "mtp_num_layers": 1} | MOE)
    policy, plugs, high = engine.run.policy, engine.emulation.plugs, engine.emulation.high
    for name, plug in plugs.items():
        assert plug.gemms == policy.of_path(name, 3), name
    assert {name for name in high if policy.of_path(name, 3).distinct} == set()
    assert "decoder.layers.0.self_attention.linear_qkv" in high
    assert "mtp.layers.0.eh_proj" in high
    # the layer inside is called transformer_layer in megatron-core 0.16 and mtp_model_layer since
    (extra,) = (plug for name, plug in plugs.items() if name.startswith("mtp.") and name.endswith("linear_qkv"))
    assert extra.quantizer.quant.scaling == "mxfp8"
    mixed = plugs["decoder.layers.2.mlp.experts.local_experts.3.linear_fc1"]
    assert (mixed.fprop.quant.scaling, mixed.dgrad.quant.scaling, mixed.wgrad) == ("nvfp4", "mxfp8", None)
    assert all(torch.isfinite(torch.tensor(losses(engine))))


def losses(engine: Any, steps: int = 2) -> list[float]:
    batches = tiny.batches()
    return [engine.train_step(batches, microbatches=2).loss for _ in range(steps)]


def layers_for(recipe: str) -> int:
    """Deep enough that a recipe with high-precision edges quantizes something."""
    first, last = resolve(get_mixed_precision_config(recipe)).ends or (0, 0)
    return max(2, first + last + 1)


@pytest.fixture(scope="module")
def unquantized() -> dict[str, list[float]]:
    """Losses by 16-bit recipe and depth."""
    return {}


SEVENTEEN_LAYERS = "nemotron_3_ultra_bf16_with_nvfp4_mixed"
"""It has two edge layers more than nemotron_3_super's recipe."""


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=pytest.mark.slow if name == SEVENTEEN_LAYERS else ()) for name in QUANTIZED]
)
def test_every_recipe_trains_and_pausing_gives_the_unquantized_numbers(
    recipe: str, build: Any, unquantized: Any
) -> None:
    deep, half = {"num_layers": layers_for(recipe)}, recipe.startswith("fp16")
    base, scaled = ({"recipe": name, "loss_scale": 1024.0} if half else name for name in ("fp16_mixed" if half else "bf16_mixed", recipe))  # fmt: skip
    if (key := json.dumps([base, deep])) not in unquantized:
        plain = build(base, model=deep, emulate=False)
        unquantized[key] = losses(plain)
        plain.close()
    expected = unquantized[key]
    engine = build(scaled, model=deep)
    assert isinstance(engine, EmulatedEngine)
    assert engine.emulation.plugs
    with engine.emulation.paused():
        paused = losses(engine)
    engine.close()
    assert paused == expected
    found = losses(build(scaled, model=deep))
    assert found != expected
    assert found == pytest.approx(expected, abs=0.05)


def test_the_flag_changes_how_and_never_what() -> None:
    for recipe, entry in recipes.items():
        settings: Any = {"model": {"num_layers": layers_for(recipe)}} | (
            {"engine": entry.engine} if entry.engine else {}
        )
        on, off = (tiny.run(recipe, emulate=flag, **settings) for flag in (True, False))
        assert on.policy == off.policy
        assert on.policy.fingerprint() == off.policy.fingerprint()
        assert on.container.mixed_precision == off.container.mixed_precision
        assert (emulation_for(on) is None) == (not on.policy.quantized)
        assert emulation_for(off) is None


def test_experts_are_quantized_one_by_one_and_an_empty_one_is_harmless(build: Any) -> None:
    engine = build({"recipe": SHORT["mxfp8"]}, model=MOE | {"moe_router_topk": 1, "moe_router_pre_softmax": True})
    fed: set[str] = set()
    experts = [n for n in engine.emulation.plugs if "experts" in n]
    assert len(experts) == 16
    router = next(module for chunk in engine.model for name, module in chunk.named_modules() if name.endswith("router"))
    assert not hasattr(router, "plug")
    with torch.no_grad():
        router.weight.zero_()  # every token goes to the same expert: the others get none
    engine.emulation.observer = SimpleNamespace(see=lambda slot, *operand: fed.add(slot))
    found = losses(engine, 1)
    assert found[0] == pytest.approx(4.2, abs=0.5)
    assert 0 < len([name for name in experts if name in fed]) < 16


@pytest.mark.parametrize("recipe", [SHORT["delayed"], SHORT["mxfp8"]], ids=["delayed", "mxfp8"])
def test_recomputed_activations_see_the_operands_of_the_first_run(recipe: str, build: Any) -> None:
    plain = build(recipe)
    expected = losses(plain, 3)
    scales = plain.emulation.state()
    plain.close()
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    again = build(recipe, model=recomputed)
    assert losses(again, 3) == expected
    assert all(torch.equal(tensor, scales[name]) for name, tensor in again.emulation.state().items())


@pytest.mark.parametrize("recipe", [SHORT["delayed"], SHORT["nvfp4"]], ids=["delayed", "nvfp4"])
def test_a_checkpoint_resumes_bit_for_bit(recipe: str, build: Any, tmp_path: Path) -> None:
    from tests.backend.contract.engine_contract import load, save

    whole = build(recipe)
    losses(whole, 2)
    save(whole, tmp_path / "checkpoint")
    expected = losses(whole, 2)
    whole.close()
    resumed = build(recipe)
    load(resumed, tmp_path / "checkpoint")
    assert losses(resumed, 2) == expected


def test_evaluating_leaves_training_as_it_is(build: Any) -> None:
    results = []
    for looks in (False, True):
        engine = build(SHORT["nvfp4"])
        batches = tiny.batches()
        first = engine.train_step(batches, microbatches=2).loss
        if looks:
            engine.evaluate(tiny.batches(seed=9), microbatches=1)
        results.append((first, engine.train_step(batches, microbatches=2).loss))
        engine.close()
    assert results[0] == results[1]


def test_delayed_updates_once_a_micro_batch(build: Any) -> None:
    engine = build(SHORT["delayed"])
    quantizer = next(iter(engine.emulation.quantizers.values()))
    moves: list[str] = []
    for name in ("forward", "backward"):
        after(quantizer, f"end_{name}", partial(moves.append, name))
    engine.train_step(tiny.batches(), microbatches=3)
    assert moves == ["forward", "backward"] * 3
    moves.clear()
    engine.evaluate(tiny.batches(), microbatches=2)
    assert moves == []


# --- two processes ------------------------------------------------------------------------------------------------------------------------
CASES = [f"{layout}/{SHORT[kind]}" for layout in ("tp2", "dp2") for kind in ("delayed", "tensorwise", "mxfp8")]
CASES += [f"sp2/{SHORT[kind]}" for kind in ("delayed", "mxfp8", "nvfp4")]
CASES += [f"{layout}/{SHORT['delayed']}" for layout in ("pp2", "ep2")]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return worker.world(2, CASES, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return worker.world(1, [f"one/{SHORT[kind]}" for kind in SHORT], tmp_path_factory.mktemp("one"))


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if not c.startswith(("pp2", "ep2"))])
def test_parallel_layouts_train_as_one_process_does(case: str, one: dict[str, Any], two: dict[str, Any]) -> None:
    expected = one["one/" + case.partition("/")[2]][0]["losses"]
    ranks = [report["losses"] for report in two[case]]
    assert ranks[0] == ranks[1]
    assert all(report["plugs"] for report in two[case])
    # tensor parallelism sums in another order and scales row-parallel inputs a shard at a time, as Transformer Engine does
    assert ranks[0] == pytest.approx(expected, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "sp2", "dp2", "ep2"])
def test_delayed_histories_are_equal_on_all_ranks_of_the_amax_group(layout: str, two: dict[str, Any]) -> None:
    first, second = (report["state"] for report in two[f"{layout}/{SHORT['delayed']}"])
    assert first == second
    assert any(scale[0] != 1.0 for scale in first.values())


@pytest.mark.slow
def test_pipeline_stages_name_layers_over_the_whole_model(two: dict[str, Any]) -> None:
    first, second = (report["plugs"] for report in two[f"pp2/{SHORT['delayed']}"])
    assert all(name.startswith("decoder.layers.0.") for name in first)
    assert all(name.startswith("decoder.layers.1.") for name in second)
