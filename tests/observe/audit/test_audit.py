"""The audit on megatron-core's own engine: silent where all is well, and naming what was broken on purpose."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpbridge.common.errors import AuditFailed
from mpbridge.common.formats import DType
from mpbridge.observe.audit import AuditHook, Before, audit
from mpbridge.observe.audit.between import Cadence
from mpbridge.observe.audit.weights import moved
from mpbridge.precision.policy import Quant, Region
from tests.observe.audit.catalogue import MOE, SHARDED
from tests.observe.audit.faults import changed

BF16_WIRE = {"recipe": "bf16_mixed", "grad_reduce_in_fp32": False}
AWARE = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}


def promise(engine: Any, *, emulate: bool = False, **facts: Any) -> None:
    """Makes the run promise something else than what was built: the engine is wrong from then on."""
    policy = dataclasses.replace(engine.run.policy, **facts)
    engine.run = dataclasses.replace(engine.run, policy=policy, emulate=emulate)


HEALTHY = {
    "fp32": ("fp32", {}),
    "bf16": ("bf16", {}),
    "bf16 moments": ("bf16", {"ddp": SHARDED, "optimizer": AWARE}),
    "overlap": ("bf16", {"ddp": SHARDED | {"overlap_grad_reduce": True, "overlap_param_gather": True}}),
    "fp16": ("fp16", {}),
    # megatron-core keeps the main weights under these scalings, emulated or not
    "tensorwise with FusedAdam's states": ("bf16_with_fp8_current_scaling_mixed", {"emulate": True, "ddp": SHARDED, "optimizer": AWARE, "model": {"num_layers": 3}}),
    "delayed with FusedAdam's states": ("bf16_with_fp8_delayed_scaling_mixed", {"emulate": True, "ddp": SHARDED, "optimizer": {"use_precision_aware_optimizer": True}}),
}  # fmt: skip


@pytest.mark.parametrize("case", HEALTHY)
def test_healthy_engine_is_as_promised_before_and_after_its_first_update(build: Any, drive: Any, case: str) -> None:
    kind, changes = HEALTHY[case]
    hook = AuditHook()
    results = drive(build(kind, **changes), hook, steps=20 if kind == "fp16" else 2)
    assert hook.reports["static"].ok
    live = hook.reports["live"]
    assert live.ok
    assert live.find("weights moved").found.startswith(f"{live.find('params').count} of {live.find('params').count}")
    assert live.find("wire: gradients").found == live.find("wire: gradients").promised
    if kind == "fp16":  # from 2**32 the first steps overflow: skipped steps only defer the audit
        assert sum(not result.applied for result in results) > 5


KEPT = {"keep_fp32": ["*layernorm*"]}
EXPERTS = MOE | {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
UNUSUAL = {
    # an update of SGD is the rate times the gradient, and most of it is below the rounding of BF16 weights
    "SGD, full BF16, small rate": ({"recipe": "full_bf16"}, {"optimizer": {"optimizer": "sgd", "lr": 1e-5}}),
    "parameters kept": ({"recipe": "bf16_mixed", "grad_reduce_in_fp32": False} | KEPT, {}),
    "parameters kept on FSDP2, full BF16": ({"recipe": "full_bf16"} | KEPT, {"engine": "fsdp2"}),
    "autocast": ({"recipe": "bf16_mixed", "autocast_enabled": True}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_but_healthy_run_is_not_stopped(build: Any, drive: Any, case: str) -> None:
    kind, changes = UNUSUAL[case]
    hook = AuditHook()
    drive(build(kind, **changes), hook)
    assert hook.reports["live"].ok


def test_a_buffer_that_no_recipe_decides_is_named_with_its_dtype(build: Any, drive: Any) -> None:
    hook = AuditHook()
    drive(build("bf16", model=EXPERTS), hook)
    promised, other = hook.reports["live"].find("buffers"), hook.reports["live"].find("other buffers")
    assert (promised.promised, promised.found, promised.ok) == ("fp32", "fp32", True)
    # megatron-core casts the counts of tokens with the model (Megatron-LM #7081)
    assert "bf16: local_tokens_per_expert" in other.found
    # a row that samples says how many elements it compared: 48 of each parameter, fewer of a smaller one
    parameters = hook.reports["live"].find("params").count
    assert 40 * parameters < hook.reports["live"].find("gradients").count <= 48 * parameters


def test_frozen_sgd_is_named_at_a_rate_that_shows(build: Any, drive: Any) -> None:
    engine, hook = build({"recipe": "full_bf16"}, optimizer={"optimizer": "sgd", "lr": 1.0}), AuditHook()
    engine.optimizer.chained_optimizers[0].optimizer.step = lambda *args, **kwargs: None
    with pytest.raises(AuditFailed, match="weights moved"):
        drive(engine, hook)


def test_bytes_are_those_of_the_live_tensors(build: Any, drive: Any) -> None:
    hook = AuditHook()
    engine = build("bf16")
    drive(engine, hook)
    size = sum(parameter.numel() for _, parameter in engine.named_parameters())
    found = {finding.subject: finding.bytes / size for finding in hook.reports["live"].findings if finding.bytes}
    # row 3 of the memory table: 18 bytes per parameter; the optimizer reads the gradient buffer, which is paid for once
    assert found == {"params": 2, "main_params": 4, "grads": 4, "exp_avg": 4, "exp_avg_sq": 4}


def test_reduction_in_another_dtype_is_seen_on_the_collective(build: Any, drive: Any) -> None:
    said: list[Any] = []
    engine, hook = build(BF16_WIRE), AuditHook(mode="warn", show=said.append)
    promise(engine, reduce=DType.FP32)
    drive(engine, hook)
    static, live = hook.reports["static"], hook.reports["live"]
    assert (static.find("grads").promised, static.find("grads").found) == ("fp32", "bf16")
    assert not live.find("wire: gradients").ok
    assert live.find("wire: gradients").found == "bf16"
    assert any(isinstance(line, str) and line.startswith("audit: grads: promised fp32, found bf16") for line in said)


def test_parameters_in_another_dtype_stop_the_run_before_the_first_step(build: Any) -> None:
    engine = build("bf16")
    promise(engine, params=DType.FP16)
    with pytest.raises(AuditFailed, match="params: promised fp16, found bf16") as caught:
        audit(engine.run.policy, engine).require()
    assert caught.value.exit_code == 1


def test_no_linear_may_run_silently_in_high_precision(build: Any, drive: Any) -> None:
    engine, hook = build("bf16"), AuditHook()
    promise(engine, emulate=True, regions=(Region(quant=Quant(format="e4m3", scaling="mxfp8")),))
    with pytest.raises(AuditFailed, match="linears"):
        drive(engine, hook)


def test_flags_that_disagree_about_the_gradient_are_found(build: Any) -> None:
    engine = build("bf16", ddp=SHARDED, optimizer=AWARE)
    engine.optimizer.chained_optimizers[0].optimizer.use_decoupled_grad = False
    fault = audit(engine.run.policy, engine).find("derived flags")
    assert not fault.ok
    assert "use_decoupled_grad=False, megatron-core's own flag is True" in fault.offenders[0]


@pytest.mark.parametrize("lr", [0.0, 1e-9])
def test_warm_up_from_zero_is_never_stopped(build: Any, drive: Any, lr: float) -> None:
    engine, hook = build("bf16"), AuditHook()

    def warm_up(step: int) -> None:
        for group in engine.optimizer.param_groups:
            group["lr"] = lr if step < 2 else 1e-3

    drive(engine, hook, steps=3, before=warm_up)
    moved = hook.reports["live"].find("weights moved")
    assert moved.ok
    # at 1e-9 the first update already counts, and what FP32 rounding swallows is said, not blamed
    assert ("below rounding" in moved.found) is (lr > 0)


def test_nonfinite_step_defers_the_live_audit(build: Any, drive: Any) -> None:
    engine, hook, norms = build("bf16"), AuditHook(), iter([float("nan")])
    changed(engine.optimizer, "get_grad_norm", lambda norm: next(norms, norm))
    results = drive(engine, hook, steps=2)
    assert [result.applied for result in results] == [False, True]
    assert hook.reports["live"].ok


def test_nothing_watches_once_a_step_was_observed_or_the_hook_is_closed(build: Any, drive: Any) -> None:
    from torch.nn.modules import module as modules
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes

    def installed() -> tuple[int, int, int]:
        return len(modes()), len(modules._global_forward_pre_hooks), len(modules._global_forward_hooks)

    engine, hook, nothing = build("bf16", ddp=SHARDED), AuditHook(), installed()
    training = SimpleNamespace(engine=engine)
    hook.built(training)
    hook.stepping(training)
    assert installed() == tuple(count + 1 for count in nothing)
    hook.closed()
    assert installed() == nothing
    drive(engine, hook, steps=2)
    assert installed() == nothing
    assert not any(module._forward_hooks for module in engine.model[0].modules())


def test_precision_json_keeps_what_else_is_there(build: Any, drive: Any, tmp_path: Any) -> None:
    (tmp_path / "precision.json").write_text(json.dumps({"plan": {"schema": 1}}))
    drive(build("bf16"), AuditHook(folder=tmp_path))
    data = json.loads((tmp_path / "precision.json").read_text())
    assert data["plan"] == {"schema": 1}
    assert data["audit"]["static"]["ok"]
    live = data["audit"]["live"]
    layouts = {tuple(layout["roles"].items()): layout["parameters"] for layout in live["parameters"]}
    assert sum(len(names) for names in layouts.values()) == live["findings"][0]["count"]
    assert len(live["fingerprint"]) == 64


def test_run_without_any_update_says_that_nothing_was_proved(build: Any, drive: Any) -> None:
    said: list[Any] = []
    drive(build("bf16"), AuditHook(show=said.append), steps=0)
    assert said[-1] == "audit: no update was applied, so main weights and moments were never checked"


def test_audit_changes_no_number(build: Any, drive: Any) -> None:
    first = build("bf16")
    watched = drive(first, AuditHook(), steps=3)
    first.close()
    from tests.backend.engines import tiny

    engine, batches = build("bf16"), tiny.batches()
    assert [result.loss for result in watched] == [engine.train_step(batches, microbatches=2).loss for _ in range(3)]


def test_an_audited_step_costs_a_few_plain_ones(build: Any, drive: Any) -> None:
    """CPU time of steps that take turns, so that neither another process nor a slower machine moves the ratio."""
    hook, moments = AuditHook(every=2), [0.0]
    drive(build("bf16"), hook, steps=8, after=lambda step: moments.append(time.process_time()))
    took = [after - before for before, after in itertools.pairwise(moments)]
    assert [one["step"] for one in hook.history if one["stage"] == "live"] == [1, 2, 4, 6, 8]
    # of steps 3 to 8: the first two warm up
    assert statistics.median(took[3::2]) < 20 * statistics.median(took[2::2])


@pytest.mark.parametrize("cost", [0.001, 0.1, 40.0])
def test_the_next_audit_falls_where_audits_stay_a_small_share_and_at_most_250_steps_on(cost: float) -> None:
    cadence = Cadence(None)
    assert cadence.next_by_time(7, cost) == 7 + 25  # nothing is known of a usual step yet
    cadence._usual = 0.5
    steps = cadence.next_by_time(7, cost) - 7
    assert 25 <= steps <= 250
    assert steps == 250 or cost / steps < 0.005 * cadence._usual
    assert steps == 25 or cost / (steps - 2) > 0.002 * cadence._usual  # and no later than needed


def test_moved_needs_no_copy_of_the_weights(build: Any) -> None:
    engine = build("fp32")
    before = Before(engine)
    assert not moved(engine, before, 1e-3).moved
    with torch.no_grad():
        next(p for n, p in engine.named_parameters() if n.endswith("linear_proj.weight")).view(-1)[7] += 1.0
    assert moved(engine, before, 1e-3).moved == ["decoder.layers.0.self_attention.linear_proj.weight"]


def test_experts_without_tokens_are_excepted(build: Any, drive: Any) -> None:
    many = {"num_moe_experts": 64, "moe_ffn_hidden_size": 16, "moe_router_load_balancing_type": "none"}
    hook = AuditHook()
    drive(build("bf16", model=MOE | many | {"num_layers": 1}), hook)
    moved = hook.reports["live"].find("weights moved")
    assert moved.ok
    assert "in experts without tokens" in moved.found, "128 choices do not reach all of 64 experts"


def test_an_engine_that_promises_fp32_takes_it_and_names_who_allows_tf32_later(build: Any, drive: Any) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        engine = build("fp32")
        assert torch.get_float32_matmul_precision() == "highest"
        drive(engine, AuditHook())
        torch.set_float32_matmul_precision("high")
        with pytest.raises(AuditFailed, match="products of FP32 factors: promised fp32, found tf32"):
            drive(engine, AuditHook())
        torch.set_float32_matmul_precision("highest")
        engine.close()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
