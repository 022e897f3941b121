"""Which Adam for which policy, the storage that follows from it, and the warning that BF16 moments deserve."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.backend.engines import shard_optimizer as warnings
from mpbridge.backend.engines.optimizers import CpuFusedAdam
from mpbridge.common.formats import DType
from tests.backend.engines import tiny


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "_warned", set())


def parameters(dtype: torch.dtype = torch.bfloat16, *, frozen: bool = False) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=not frozen)]


CASES = {
    "AdamW on BF16": (torch.optim.AdamW, {}, 1),
    "Adam on BF16": (torch.optim.Adam, {}, 1),
    "FP32": (torch.optim.AdamW, {"dtype": torch.float32}, 0),
    "FP16": (torch.optim.AdamW, {"dtype": torch.float16}, 0),
    "frozen": (torch.optim.AdamW, {"frozen": True}, 0),
    "SGD": (torch.optim.SGD, {}, 0),
    "FusedAdam": (CpuFusedAdam, {}, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_a5_bf16_adam_is_warned_about_once_and_nothing_else(case: str, caplog: Any) -> None:
    kind, made, expected = CASES[case]
    held = parameters(**made)
    optimizer = kind(held, lr=0.1)
    with caplog.at_level(logging.WARNING, logger="mpbridge"):
        said = [warnings.warn_bf16_adam([optimizer], held) for _ in range(2)]
    assert said == [bool(expected), False]
    assert len(caplog.records) == expected


def test_a5_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    held = parameters()
    assert not warnings.warn_bf16_adam([torch.optim.AdamW(held)], held)
    assert not caplog.records


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


def test_g5_the_risky_recipe_warns_where_it_is_built(engines: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="mpbridge"):
        for kind in ("bf16_params_fp32_states", "fp32_params_bf16_compute", "full_bf16"):
            engines(kind, engine="fsdp2").close()
    assert sum("second moment stalls" in record.message for record in caplog.records) == 1
