"""Settings that nothing reads are named; what matters, and megatron-core's own defaults, are not."""

from __future__ import annotations

import pytest

from mpbridge.planning.rules.table import broken
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.inert import inert
from mpbridge.precision.registry import recipes
from mpbridge.settings.container import ConfigContainer


@pytest.mark.parametrize(("given", "named"), [
    ({"bf16": True, "fp8_recipe": "mxfp8"}, ["fp8_recipe"]),
    ({"bf16": True, "fp8_recipe": "delayed"}, []),
    ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "mxfp8"}, []),
    ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise", "num_layers_at_start_in_bf16": 2}, ["num_layers_at_start_in_bf16"]),
    ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise", "num_layers_at_start_in_bf16": 2, "first_last_layers_bf16": True}, []),
    ({"bf16": True, "hysteresis": 4}, ["hysteresis"]),
    ({"fp16": True, "hysteresis": 4}, []),
])  # fmt: skip
def test_what_nothing_reads_is_named(given: dict[str, object], named: list[str]) -> None:
    assert [words.partition("=")[0] for words in inert(MixedPrecisionConfig(**given))] == named


def test_no_recipe_is_blamed_for_what_it_carries() -> None:
    for name in recipes:
        entry = recipes[name]
        assert inert(entry.make(), entry.make()) == ()


def test_check_warns_of_it() -> None:
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_sequence_length": 64}
    box = ConfigContainer(mixed_precision={"recipe": "bf16_mixed", "fp8_recipe": "mxfp8"}, model=model)
    run = box.resolved(training=False)
    (found,) = [violation for violation in broken(run.policy, run.facts) if violation.rule == "settings-without-effect"]
    assert (found.severity, found.found) == ("warning", "fp8_recipe=mxfp8 (read only with fp8)")


@pytest.mark.parametrize(("recipe", "section", "warned"), [({}, {}, False), ({"store_param_remainders": True}, {}, True),
    ({"store_param_remainders": True}, {"use_precision_aware_optimizer": True}, False), ({}, {"store_param_remainders": True}, False)])  # fmt: skip
def test_remainders_are_read_by_a_precision_aware_optimizer_only(
    recipe: dict[str, bool], section: dict[str, bool], warned: bool
) -> None:
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_sequence_length": 64}
    mixed = {"recipe": "bf16_mixed", **recipe}
    facts = ConfigContainer(mixed_precision=mixed, model=model, optimizer=section).resolved(training=False).facts
    assert any(words.startswith("store_param_remainders=true") for words in facts.inert) is warned


def test_whole_numbers_written_as_fractions_are_whole() -> None:
    config = MixedPrecisionConfig(fp16=True, hysteresis=2.0)  # type: ignore[arg-type]
    assert config == MixedPrecisionConfig(fp16=True)
    assert type(config.hysteresis) is int
