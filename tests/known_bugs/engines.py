"""Bugs of megatron-core's stack, planted in a tiny run of mpbridge's engines: the losses without any audit, then what the audits say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from mpbridge.backend.devices import device_layer
from mpbridge.backend.engines.parallel import start_process_group, stop_process_group
from mpbridge.backend.engines.registry import build_engine
from mpbridge.observe.audit import AuditHook
from tests.backend.engines import tiny, two_ranks
from tests.observe.audit.compute_faults import edge_quantized
from tests.observe.audit.faults import gpt, linear, model_never_refreshed

Plant = Callable[[Any], None]
SHARDED = {"ddp": {"use_distributed_optimizer": True}}
EXPERTS = {
    "model": {
        "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid",
    }
}  # fmt: skip
STEPS = 3


def healthy(engine: Any) -> None:
    """Nothing is planted."""


def trained(plant: Plant, changes: dict[str, Any], *, audited: bool = False) -> tuple[list[float], str]:
    """(losses of three steps and of the evaluations after each, what the audits of every step find)."""
    mine = start_process_group(False)
    with device_layer(False):
        engine = build_engine(tiny.run(**({"kind": "bf16"} | changes)))
    hook, training = AuditHook(mode="warn", every=1), SimpleNamespace(engine=engine)
    batches, losses = tiny.batches(), []
    plant(engine)
    try:
        if audited:
            hook.built(training)
            hook.started(training)
        for _ in range(STEPS):
            if audited:
                hook.stepping(training)
            losses.append((result := engine.train_step(batches, microbatches=2)).loss)
            if audited:
                hook.stepped(training, result)
                hook.evaluating(training)
            losses.append(engine.evaluate(tiny.batches(seed=1), microbatches=1))
            if audited:
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
            assert torch.equal(
                module.expert_bias + 1 + 1e-3, torch.ones_like(module.expert_bias)
            )  # a small update is lost


def router_in_bf16(engine: Any) -> None:
    """The gate's scores are computed from BF16 logits although the run asks for FP32 (the FP32 path is skipped)."""
    for module in gpt(engine).modules():
        if hasattr(module, "expert_bias"):
            module.config = SimpleNamespace(**{**vars(module.config), "moe_router_dtype": None})


def one_micro_batch_counts(engine: Any) -> None:
    number = itertools.count()
    linear(engine).weight.register_hook(lambda grad: torch.zeros_like(grad) if next(number) % 2 else grad)


def gathered_weights_in_the_gradient_buffer(engine: Any) -> None:
    ddp = engine.model[0]
    real = ddp.zero_grad_buffer

    def zero() -> None:
        real()
        for buffer in ddp.buffers:
            buffer.grad_data.copy_(buffer.param_data.float())

    ddp.zero_grad_buffer = zero


def evaluated_one_step_behind(engine: Any) -> None:
    kept: dict[str, torch.Tensor] = {}
    real = engine.evaluate

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        now = {name: one.detach().clone() for name, one in engine.named_parameters()}
        for name, one in engine.named_parameters():
            one.data.copy_(kept.get(name, now[name]))
        loss = real(*args, **kwargs)
        for name, one in engine.named_parameters():
            one.data.copy_(now[name])
        kept.update(now)
        return loss

    engine.evaluate = evaluate


def stale_after_evaluation(engine: Any) -> None:
    real = engine.evaluate

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        loss = real(*args, **kwargs)
        linear(engine).weight.data.mul_(0.9)
        return loss

    engine.evaluate = evaluate


def loaded_without_main_weights(engine: Any) -> None:
    real, number = engine.train_step, itertools.count(1)

    def train_step(*args: Any, **kwargs: Any) -> Any:
        if next(number) == STEPS:
            for _, one in engine.named_parameters():
                one.data.mul_(0.5)
        return real(*args, **kwargs)

    engine.train_step = train_step


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
