"""What a target has no words for is not proposed: through quant_recipe on a machine, and in another stack's export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpbridge.common.errors import BadValue, Refused
from mpbridge.common.facts import RunFacts
from mpbridge.common.machines import machine
from mpbridge.planning.capability import ASSUMED
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.settings.container import ConfigContainer
from mpbridge.training.tune.levels import Where, base_of, expressible, levels_of, runnable

TINY = Path(__file__).parents[3] / "configs" / "gpt_tiny.yaml"


def asked(recipe: str, *words: str, **changes: Any) -> tuple[dict[str, Any], MixedPrecisionConfig, RunFacts]:
    config = get_mixed_precision_config(recipe).derive(**changes)
    box = ConfigContainer.load(TINY, check=False)
    box.mixed_precision = config
    run = box.resolved(1, machine=machine("b200"), versions=ASSUMED).facts
    base = base_of(config)
    return levels_of(words, resolve(base)), base, run


def test_formats_by_linear_are_proposed_where_quant_recipe_and_megatron_lms_file_can_say_them() -> None:
    levels, base, run = asked("bf16_with_nvfp4_mixed", "mxfp8", "tensorwise")
    assert expressible(levels, base, run=run, stack="megatron-lm", asked=True) == (levels, [])


def test_weights_at_rest_in_one_format_leave_nothing_to_choose_on_a_machine() -> None:
    """megatron-core makes every weight of a layer low-precision, so no linear of it can differ; the emulation can."""
    levels, base, run = asked("bf16_with_mxfp8_mixed", fp8_param_gather=True)
    with pytest.raises(Refused, match=r"so there is nothing to choose.*stored.*fp8_param_gather=false"):
        expressible(levels, base, run=run, stack=None, asked=False)
    assert expressible(levels, base, run=None, stack=None, asked=False) == (levels, [])


@pytest.mark.parametrize("stack", ["megatron-bridge", "torchtitan", "deepspeed"])
def test_a_stack_without_words_for_single_linears_is_named_with_its_reason(stack: str) -> None:
    levels, base, _ = asked("bf16_with_nvfp4_mixed", "mxfp8")
    with pytest.raises(Refused, match=f"nothing to choose: {stack}: self_attention.linear_proj of layers? 0"):
        expressible(levels, base, run=None, stack=stack, asked=True)


def test_a_level_without_words_is_left_out_or_refused_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    why = {"tensorwise": "no word"}
    monkeypatch.setattr("mpbridge.training.tune.levels._why_not", lambda word, *rest: why.get(word))
    levels, base, _ = asked("bf16_with_nvfp4_mixed", "mxfp8", "tensorwise")
    kept, notes = expressible(levels, base, run=None, stack="megatron-lm", asked=False)
    assert list(kept) == ["mxfp8", "bf16"]
    assert notes == ["level tensorwise is not proposed: it cannot be expressed: no word"]
    with pytest.raises(Refused, match="level tensorwise cannot be expressed: no word: leave it out of --levels"):
        expressible(levels, base, run=None, stack="megatron-lm", asked=True)


def test_a_level_that_the_machine_does_not_run_is_left_out_or_refused_where_it_was_asked_for() -> None:
    levels, base, _ = asked("bf16_with_fp8_current_scaling_mixed", "mxfp8")
    policy, hopper = resolve(base), Where(machine=machine("h100"))
    kept, notes = runnable(levels, policy, hopper, asked=False)
    assert list(kept) == ["bf16"]
    assert "level mxfp8 is not proposed: it does not run on H100" in notes[0]
    with pytest.raises(Refused, match=r"level mxfp8 does not run on H100 \(sm_90\): .*leave it out of --levels"):
        runnable(levels, policy, hopper, asked=True)
    assert runnable(levels, policy, Where(), asked=True) == (levels, [])


def test_a_level_of_fewer_bits_than_the_recipes_own_is_refused_with_the_recipe_to_tune() -> None:
    with pytest.raises(BadValue, match=r"level nvfp4 has 4 bits, the recipe's own format 8: .*tune a recipe of nvfp4"):
        asked("bf16_with_mxfp8_mixed", "nvfp4")
