"""megatron-core's own objects in a hand-written loop under a witness, with and without the distributed optimizer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.common.probe import installed
from mpbridge.common.versions import at_least
from scripts.evidence.witness_megatron import megatron
from tests.observe.audit.faults import after
from tests.worlds import one_process, reported


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with one_process():
        yield


@pytest.mark.parametrize("distributed", [False, True], ids=["DDP", "distributed optimizer"])
def test_bf16_in_megatrons_loop_is_bf16_mixed(distributed: bool) -> None:
    seen = megatron(wrapper="distributed" if distributed else "ddp", policy="bf16_mixed")
    assert seen.ok, seen.report.faults
    assert str(seen.nearest) == "bf16_mixed, exactly"
    found = seen.as_data()["described"]
    assert (found["storage"], found["main"], found["accumulator"], found["exp_avg"]) == ("bf16", "fp32", "fp32", "fp32")
    assert found["sharded"] == ("optimizer" if distributed else "nothing")
    assert found["bytes_per_parameter"] == pytest.approx(18.0, abs=0.1)
    subjects = {one.subject for one in seen.report.findings}
    assert {"derived flags", "weights as read", "gradients", "residual stream", "attention"} <= subjects


COMPARED = {"params", "main_params", "weights as read", "weights moved", "replicas", "wire: gradients", "gradients", "optimizer step"}  # fmt: skip
"""What must have been looked at, and found as promised, in a sound loop on two ranks."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Case -> subject -> its finding on two ranks."""
    program, wrappers = str(Path(__file__).with_name("two_ranks.py")), ("distributed", "overlapped", "megatron_fsdp_gradients", "megatron_fsdp_unsharded")  # fmt: skip
    found = reported(
        2, program, tmp_path_factory.mktemp("two") / "out.json", *(f"core {wrapper}" for wrapper in wrappers)
    )
    return {
        case.removeprefix("core "): {one["subject"]: one for one in seen["audit"]["findings"]}
        for case, seen in found.items()
    }


def wrong(held: dict[str, Any]) -> set[str]:
    return {subject for subject, one in held.items() if not one["ok"] and "not_observed" not in one}


@pytest.mark.parametrize("wrapper", ["distributed", "overlapped", "megatron_fsdp_gradients"])
def test_two_ranks_whose_parameters_follow_in_the_next_forward_pass_raise_no_alarm(two: Any, wrapper: str) -> None:
    """With overlap_param_gather a rank has only its own shard of an update when the step ends; Megatron-FSDP may divide main weights and leave weights whole."""
    held = two[wrapper]
    assert not wrong(held)
    assert set(held) >= COMPARED
    if wrapper.startswith("megatron_fsdp"):
        assert held["weights as read"]["count"] >= held["replicas"]["count"] == held["shards"]["count"]


def test_whole_parameters_under_megatron_fsdp_are_compared_on_every_rank(two: Any) -> None:
    """`no_shard`: until a release behind 0.16 its norm counts every replica, so that clipping divides by too much."""
    held = two["megatron_fsdp_unsharded"]
    assert wrong(held) == (set() if at_least(installed().megatron_core, "0.20") else {"gradient norm as clipped"})
    assert set(held) >= COMPARED
    assert "shards" not in held
    assert held["weights as read"]["count"] == held["params"]["count"] == 2 * held["replicas"]["count"]


def left_behind(wrapped: Any, optimizer: Any) -> None:
    wrapped.param_and_grad_buffer.copy_main_weights_to_model_weights = lambda *a, **k: None


def never_copied(wrapped: Any, optimizer: Any) -> None:
    for part in optimizer.chained_optimizers:
        part._copy_main_params_to_model_params = lambda *a, **k: None


def doubled(wrapped: Any, optimizer: Any) -> None:
    weight = wrapped.module.module.decoder.layers[0].mlp.linear_fc1.weight
    after(wrapped.config, "finalize_model_grads_func", lambda: weight.main_grad.mul_(2))


def reduced_otherwise(wrapped: Any, optimizer: Any) -> None:
    wrapped.ddp_config.grad_reduce_in_fp32 = False


@pytest.mark.parametrize(
    ("spoil", "policy", "subject", "words"),
    [
        (never_copied, None, "weights as read", ""), (doubled, "bf16_mixed", "gradients", "decoder.layers.0.mlp.linear_fc1.weight"),
        (reduced_otherwise, "bf16_mixed", "derived flags", "grad_reduce_in_fp32"),
    ],
)  # fmt: skip
def test_what_is_spoiled_is_named(spoil: Any, policy: str | None, subject: str, words: str) -> None:
    (fault,) = megatron(policy=policy, spoil=spoil).report.faults
    assert fault.subject == subject
    assert words in str(fault)


@pytest.mark.parametrize("strategy", ["gradients", "unsharded"])
def test_weights_that_do_not_follow_their_main_weights_under_megatron_fsdp_are_named(strategy: Any) -> None:
    seen = megatron(wrapper=f"megatron_fsdp_{strategy}", spoil=left_behind)  # type: ignore[arg-type]
    assert "weights as read" in {fault.subject for fault in seen.report.faults}


def test_megatron_fsdp_that_neither_shards_nor_keeps_main_weights_is_witnessed(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpbridge.backend.megatron import inside_fsdp

    def alone(config: Any, ddp: Any, *more: Any) -> Any:
        until_016 = hasattr(ddp, "preserve_fp32_weights")
        newer = dict.fromkeys(("megatron_fsdp_main_params_dtype", "megatron_fsdp_main_grads_dtype"))
        none = {"preserve_fp32_weights": False} if until_016 else newer
        return wrap(config, replace(ddp, **none), *more)

    wrap = inside_fsdp.wrap
    monkeypatch.setattr(inside_fsdp, "wrap", alone)
    # it reads gradients of 16 bits on a GPU only
    monkeypatch.setattr("megatron.core.optimizer.optimizer.MegatronOptimizer.clip_grad_norm", lambda *args: 1.0)
    report = megatron(wrapper="megatron_fsdp_unsharded").report
    assert {one.subject for one in report.faults} == {"main weights"}
    assert {"weights moved", "gradients"} <= {one.subject for one in report.findings}


def test_nothing_is_left_on_megatrons_optimizer() -> None:
    kept: list[Any] = []
    megatron(spoil=lambda wrapped, optimizer: kept.extend((wrapped, optimizer)))
    wrapped, optimizer = kept
    assert "step" not in vars(optimizer)
    assert not torch.nn.modules.module._global_forward_hooks
    assert not any(module._forward_pre_hooks for module in wrapped.modules())


EXAMPLE = os.environ.get("MPBRIDGE_MEGATRON_LM", "")


@pytest.mark.skipif(
    not EXAMPLE,
    reason="Megatron-LM's example: MPBRIDGE_MEGATRON_LM=its checkout (and what its core needs, after a colon)",
)
def test_megatron_lms_own_example_loop_updates_nothing(tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("example_loop.py"))
    found = reported(2, program, tmp_path / "out.json")
    faults = {one["subject"]: one for one in found["audit"]["findings"] if not one["ok"] and "not_observed" not in one}
    assert set(faults) == {"weights moved", "gradients"}
    assert faults["weights moved"]["found"].startswith("0 of ")
    assert reported(2, program, tmp_path / "mended.json", "--mended")["ok"]
