"""Bugs of megatron-core's stack, planted in a tiny run of mpbridge's engines: the losses without any audit, then what the audits say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch

from mpbridge.backend.devices import device_layer
from mpbridge.backend.engines.parallel import start_process_group, stop_process_group
from mpbridge.backend.engines.registry import build_engine
from mpbridge.observe.audit import AuditHook
from tests.backend.engines import tiny, two_ranks
from tests.observe.audit.catalogue import MOE
from tests.observe.audit.compute_faults import edge_quantized
from tests.observe.audit.faults import after, around, gpt, linear, model_never_refreshed

Plant = Callable[[Any], None]
SHARDED = {"ddp": {"use_distributed_optimizer": True}}
EXPERTS = {"model": MOE | {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}}
STEPS = 3


def healthy(engine: Any) -> None:
    """Nothing is planted."""


def trained(plant: Plant, changes: dict[str, Any], *, audited: bool = False) -> tuple[list[float], str]:
    """(losses of three steps and of the evaluations after each, what the audits of every step find)."""
    mine = start_process_group(False)
    with device_layer(False):
        engine = build_engine(tiny.run(**({"kind": "bf16"} | changes)))
    hook: Any = AuditHook(mode="warn", every=1) if audited else Mock(history=[])
    training, batches, losses = SimpleNamespace(engine=engine), tiny.batches(), []
    plant(engine)
    try:
        hook.built(training)
        hook.started(training)
        for _ in range(STEPS):
            hook.stepping(training)
            losses.append((result := engine.train_step(batches, microbatches=2)).loss)
            hook.stepped(training, result)
            hook.evaluating(training)
            losses.append(engine.evaluate(tiny.batches(seed=1), microbatches=1))
            hook.evaluated(training, losses[-1])
    finally:
        hook.closed()
        engine.close()
        if mine:
            stop_process_group()
    found = [(one["step"], one["reason"], fault) for one in hook.history for fault in one.get("faults", ())]
    return losses, "\n".join(f"step {step} ({reason}): {fault}" for step, reason, fault in found)


RUNS: dict[str, dict[str, Any]] = {
    "sharded": SHARDED, "experts": SHARDED | EXPERTS, "muon": {"kind": "fp32_params_bf16_compute", "engine": "fsdp2", "optimizer": two_ranks.MUON},
    "edges": {"kind": "bf16_with_fp8_current_scaling_mixed", "emulate": True, "model": {"num_layers": 3}},
}  # fmt: skip
_healthy = cache(lambda run: trained(healthy, RUNS[run])[0])


def play(plant: Plant, *, run: str = "sharded", shows: bool = True) -> str:
    """What the audits say. shows: the losses of these few steps differ from a healthy run's."""
    if shows:
        assert trained(plant, RUNS[run])[0] != _healthy(run)
    return trained(plant, RUNS[run], audited=True)[1]


# --- plants --------------------------------------------------------------------------------------------------------------------------------
def bias_in_bf16(engine: Any) -> None:
    for module in gpt(engine).modules():
        if getattr(module, "expert_bias", None) is not None:
            module._maintain_float32_expert_bias = lambda: None
            module.expert_bias = module.expert_bias.bfloat16()
            one = torch.ones_like(module.expert_bias)
            assert torch.equal(module.expert_bias + one + 1e-3, one)  # a small update is lost


def one_micro_batch_counts(engine: Any) -> None:
    number = itertools.count()
    linear(engine).weight.register_hook(lambda grad: torch.zeros_like(grad) if next(number) % 2 else grad)


def gathered_weights_in_the_gradient_buffer(engine: Any) -> None:
    def fill() -> None:
        for buffer in engine.model[0].buffers:
            buffer.grad_data.copy_(buffer.param_data.float())

    after(engine.model[0], "zero_grad_buffer", fill)


def evaluated_one_step_behind(engine: Any) -> None:
    kept: dict[str, torch.Tensor] = {}

    def put(values: dict[str, torch.Tensor]) -> None:
        for name, one in engine.named_parameters():
            one.data.copy_(values[name])

    def enters() -> Callable[[], None]:
        now = {name: one.detach().clone() for name, one in engine.named_parameters()}
        put(now | kept)
        kept.update(now)
        return lambda: put(now)

    around(engine, "evaluate", enters)


def stale_after_evaluation(engine: Any) -> None:
    after(engine, "evaluate", lambda: linear(engine).weight.data.mul_(0.9))


def loaded_without_main_weights(engine: Any) -> None:
    number = itertools.count(1)

    def enters() -> None:
        if next(number) == STEPS:
            for _, one in engine.named_parameters():
                one.data.mul_(0.5)

    around(engine, "train_step", enters)


def main_weights_from_quantized(engine: Any) -> None:
    for part in engine.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for one in group["params"]:
                scale = 448 / one.data.abs().amax().clamp_min(1e-12)
                one.data.copy_((one.data * scale).to(torch.float8_e4m3fn).float() / scale)
        part._copy_main_params_to_model_params()


def momentum_as_it_is(engine: Any) -> None:
    """What a flat partition gets: an update that no shape sends through the iteration."""
    muon = engine.optimizer.parts[0]
    muon._moved = lambda name, direction, group: direction * -group["lr"]


PLAYS: dict[str, Callable[[], str]] = {
    name: cache(made)
    for name, made in {
        "expert bias": partial(play, bias_in_bf16, run="experts", shows=False),
        "one micro-batch": partial(play, one_micro_batch_counts),
        "stale gather": partial(play, gathered_weights_in_the_gradient_buffer),
        "never refreshed": partial(play, model_never_refreshed),
        "evaluation behind": partial(play, evaluated_one_step_behind),
        "after evaluation": partial(play, stale_after_evaluation),
        "weights only": partial(play, loaded_without_main_weights),
        "quantized main weights": partial(play, main_weights_from_quantized),
        "quantized in spite of its rule": partial(play, edge_quantized, run="edges"),
        "not orthogonalized": partial(play, momentum_as_it_is, run="muon"),
    }.items()
}
