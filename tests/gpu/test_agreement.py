"""The emulation against the real recipe, layer by layer (scripts/evidence/gpu_agreement.py); its own machinery runs on any machine."""

import importlib

import pytest


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("scripts.evidence.gpu_agreement")


SMALL = {"layers": 3, "hidden": 128, "sequence": 32}


def test_the_same_recipe_agrees_with_itself_and_another_one_does_not(script, world):
    from mpbridge.backend.engines.mcore import McoreEngine
    from mpbridge.backend.engines.registry import build_engine
    from mpbridge.backend.models.local_spec import CpuSpecProvider

    plain, low = script.resolved("bf16_mixed", emulate=False, **SMALL), script.resolved("fp8_ds", emulate=True, **SMALL)
    first, weights = script.traced(lambda: McoreEngine.build(plain, backend=CpuSpecProvider), None, 2, 32)
    again, kept = script.traced(lambda: McoreEngine.build(plain, backend=CpuSpecProvider), weights, 2, 32)
    other, _ = script.traced(lambda: build_engine(low), weights, 2, 32)
    assert all((kept[name] == weights[name]).all() for name in weights), "the learning rate moves nothing"
    same, apart = script.apart(first, again), script.apart(first, other)
    assert [row["layer"] for row in same] == [0.0, 1.0, 2.0]
    assert all(row["hidden"] == row["gradient"] == 0.0 for row in same)
    assert all(1e-3 < row["hidden"] < 0.5 and row["gradient"] > 1e-3 for row in apart)
    assert "| 2 |" in script.table({"recipe": "x", "emulated": apart, "floor": same, "without": apart})


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp8_ds", "fp8_cs", "fp8_sc"])
def test_the_emulation_explains_most_of_what_quantization_does(recipe, script, world, on_gpu):
    on_gpu(recipe)
    found = script.agreement(recipe, layers=6, steps=3)
    print(script.table(found))
    for emulated, without in zip(found["emulated"], found["without"], strict=True):
        # layers in BF16 before the first quantized one differ by the floor alone
        assert emulated["hidden"] < max(0.5 * without["hidden"], 2e-2), (emulated, without)
        # a gradient that differs by an ulp is now and then rounded to the other FP8 code, layer by layer more: no closer than two runs of the same recipe
        assert emulated["gradient"] < max(without["gradient"], 2e-2), (emulated, without)
    # the last layer's backward pass is the first: nothing has been amplified yet
    assert found["emulated"][-1]["gradient"] < 2e-2
