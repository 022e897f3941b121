"""Which Adam for which policy, the storage that follows from it, and the warning about duplicate main weights."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.backend.engines import shard_optimizer as warnings
from mpbridge.common.formats import DType
from mpbridge.planning.rules.table import broken
from tests.backend.engines import tiny


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "_warned", set())


def parameters(dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2, dtype=dtype))]


NARROW = dict.fromkeys(("params_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "bf16")


@pytest.mark.parametrize(
    ("optimizer", "fields", "params"),
    [("torch_adamw", {}, "fp32"), ("sgd", {}, "fp32"), ("adam", {}, "bf16"), ("torch_adamw", NARROW, "bf16")],
)
def test_a6_a_run_on_fsdp2_stores_what_its_optimizer_needs(optimizer: str, fields: dict[str, str], params: str) -> None:
    run = tiny.run({"bf16": True, **fields}, engine="fsdp2", optimizer={"optimizer": optimizer})
    assert run.policy.params.short == params
    assert run.policy.compute is DType.BF16
    assert run.facts.optimizer.name == optimizer


def test_a7_duplicate_main_weights_are_switched_off_with_one_warning(caplog: Any) -> None:
    arguments = {"master_weights": True, "store_param_remainders": True}
    with caplog.at_level(logging.WARNING, logger="mpbridge"):
        for _ in range(2):
            assert warnings.without_duplicate(parameters(torch.float32), arguments) == dict.fromkeys(arguments, False)
    assert len(caplog.records) == 1
    assert warnings.without_duplicate(parameters(), arguments) == arguments


def test_a7_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert not warnings.without_duplicate(parameters(torch.float32), {"master_weights": True})["master_weights"]
    assert not caplog.records


def test_a13_every_shipped_recipe_is_pattern_a_or_b_or_says_that_it_is_risky() -> None:
    from mpbridge.precision.registry import get_mixed_precision_config, recipes
    from mpbridge.precision.resolve import resolve

    files = [str(path) for path in (Path(__file__).parents[3] / "configs" / "recipes").glob("*.yaml")]
    assert files
    risky = []
    for name in (*recipes, *files):
        policy = resolve(get_mixed_precision_config(name)).settled()
        if policy.narrow_alone:
            risky.append(name)
    assert risky == ["full_bf16"]
    assert "converges worse" in recipes["full_bf16"].summary


@pytest.mark.parametrize(("engine", "optimizer", "recipe", "narrow"), [
    ("fsdp2", "adam", "full_bf16", True), ("fsdp2", "muon", "full_bf16", True), ("fsdp2", "sgd", "full_bf16", False),
    ("fsdp2", "adam", "bf16_params_fp32_states", False), ("fsdp2", "adam", "fp32_params_bf16_compute", False), ("fsdp2", "muon", "fp32_params_bf16_compute", False),
    ("megatron_fsdp", "adam", "full_bf16", True), ("megatron_fsdp", "sgd", "full_bf16", False), ("megatron_fsdp", "adam", "bf16_megatron_fsdp", False),
])  # fmt: skip
def test_g5_the_rule_warns_of_exactly_those_runs_in_which_torchs_adam_updates_16_bits(
    engines: Any, engine: str, optimizer: str, recipe: str, narrow: bool
) -> None:
    built = engines(recipe, engine=engine, optimizer={"optimizer": optimizer})
    torchs = [part for part in built.optimizer.parts if isinstance(part, (torch.optim.Adam, torch.optim.AdamW))]
    updated = {parameter.dtype for part in torchs for group in part.param_groups for parameter in group["params"]}
    found = {one.rule for one in broken(built.run.policy, built.run.facts)}
    assert (torch.bfloat16 in updated) is narrow
    assert ("moments-follow-16-bit-parameters" in found) is narrow
