"""Thirty faults from public bug reports that neither the audit's catalogue nor the page of known bugs has: planted by audit_faults.py to see whether the audit's promises are general.

What is written here is the report's fault as it shows in a run of megatron-core's models; the promises of the audit were not changed before the first count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.observe.audit import compute_faults as c
from tests.observe.audit import faults as f
from tests.observe.audit import hostile_faults as h
from tests.observe.audit.catalogue import ENGINES as CATALOGUES
from tests.observe.audit.catalogue import MOE, PLAIN

AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ENGINES: dict[str, tuple[Any, dict[str, Any]]] = CATALOGUES | {
    "tensorwise recomputed": ({"recipe": "bf16_with_fp8_current_scaling_mixed", **PLAIN}, {"emulate": True, "model": AGAIN}),
    "delayed recomputed": ("bf16_with_fp8_delayed_scaling_mixed", {"emulate": True, "model": AGAIN}),
    "recomputed": ("bf16", {"model": AGAIN}),
    "sequence parallel": ("bf16", {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}),
    "experts apart": ({"recipe": "bf16_mixed", "moe_router_dtype": "fp32"}, {"model": MOE, "parallel": {"expert_model_parallel_size": 2}}),
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One fault."""

    thread: str
    """owner/name#number on GitHub."""
    name: str
    plant: Callable[[Any], None]
    engines: tuple[str, ...]
    ranks: int = 1
    early: bool = True
    """False: it means something after the first update only."""
    behind: int = 0
    """Steps until it has an effect."""


# --- gradients -----------------------------------------------------------------------------------------------------------------------------
def accumulated(engine: Any) -> list[torch.Tensor]:
    """The buffers in which this rank's gradients are summed over micro-batches."""
    found = (getattr(p, "main_grad", None) for _, p in engine.named_parameters())
    return [one for one in found if isinstance(one, torch.Tensor)]


def between_micro_batches(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def plant(engine: Any) -> None:
        def act(*_: Any) -> None:
            for grad in accumulated(engine):
                grad.copy_(change(grad))

        engine.model[0].register_forward_pre_hook(act)
        f.after(engine.configs.model, "finalize_model_grads_func", act)

    return plant


def _summed_over_sequence(engine: Any) -> None:
    """The final norm's gradient stays this rank's part of the sequence."""
    for name, parameter in engine.named_parameters():
        if "final_layernorm" in name:
            parameter.sequence_parallel = False


def _tied_ends_apart(engine: Any) -> None:
    import importlib

    # the package has a function of that name
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    c.replaced(engine, module, "_allreduce_word_embedding_grads", f.nothing)


def _experts_divided(engine: Any) -> None:
    def act() -> None:
        for name, parameter in engine.named_parameters():
            if "experts" in name:
                parameter.main_grad.mul_(0.5)

    f.after(engine.configs.model, "finalize_model_grads_func", act)


# --- the optimizer -------------------------------------------------------------------------------------------------------------------------
def _norms_decayed(engine: Any) -> None:
    for group in f.inner(engine).param_groups:
        group["weight_decay"], group["wd_mult"] = 0.01, 1.0


def _other_count(engine: Any) -> None:
    """The updates are counted from another number."""
    optimizer = f.inner(engine)
    for group in optimizer.param_groups:
        if "step" in group:
            group["step"] = int(group["step"] or 0) + 1000
    for state in f.states(engine):
        if "step" in state:
            state["step"] += 1000


def _moments_rounded_once(engine: Any) -> None:
    for state in f.states(engine):
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(f.narrow(state[name]))


def _moments_empty_once(engine: Any) -> None:
    for state in f.states(engine):
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def _norms_counted_twice(engine: Any) -> None:
    def more(norm: float) -> float:
        twice = [p.main_grad for name, p in engine.named_parameters() if "layernorm" in name]
        return float((norm**2 + sum(float(one.float().norm()) ** 2 for one in twice)) ** 0.5)

    f.changed(engine.optimizer, "get_grad_norm", more)


def _eps_before_correction(engine: Any) -> None:
    optimizer = f.inner(engine)

    def enters() -> Callable[[], None]:
        kept = [group["eps"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            count = max([float(group.get("step") or 0), *(float(s.get("step", 0)) for s in f.states(engine))]) + 1
            group["eps"] = group["eps"] / (1 - group["betas"][1] ** count) ** 0.5
        return lambda: [group.update(eps=eps) for group, eps in zip(optimizer.param_groups, kept, strict=True)] and None

    f.around(optimizer, "step", enters)


def _no_bias_correction(engine: Any) -> None:
    for group in f.inner(engine).param_groups:
        group["bias_correction"] = False


def _decay_in_the_moments(engine: Any) -> None:
    optimizer = f.inner(engine)
    optimizer.adam_w_mode = False
    for group in optimizer.param_groups:
        if "decoupled_weight_decay" in group:
            group["decoupled_weight_decay"] = False


def _norm_of_a_shard(engine: Any) -> None:
    import torch.distributed as dist

    f.changed(engine.optimizer, "get_grad_norm", lambda norm: norm * (0.8, 0.6)[dist.get_rank()])


def _skips_alone(engine: Any) -> None:
    """Rank 1 finds an overflow of its own and does not update; nobody tells rank 0."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        for part in f.parts(engine):
            part.optimizer.step = f.nothing


# --- quantization --------------------------------------------------------------------------------------------------------------------------
def _recomputed_unquantized(engine: Any) -> None:
    for layer in f.gpt(engine).decoder.layers:

        def enters() -> Callable[[], None]:
            engine.emulation.is_paused = torch._C._current_autograd_node() is not None

            def leaves() -> None:
                engine.emulation.is_paused = False

            return leaves

        f.around(layer, "forward", enters)


def _recomputed_in_fp16(engine: Any) -> None:
    for layer in f.gpt(engine).decoder.layers:
        real = layer.forward

        def forward(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            if torch._C._current_autograd_node() is None:
                return real(*args, **kwargs)
            # the dtype in which autocast computes is that of its own default, not that of the first pass
            with torch.autocast("cpu", dtype=torch.float16):
                return real(*args, **kwargs)

        layer.forward = forward


def _gradient_scales_frozen(engine: Any) -> None:
    for quantizer in engine.emulation.quantizers.values():
        quantizer.end_backward = f.nothing


def _history_rolled_twice(engine: Any) -> None:
    for quantizer in engine.emulation.quantizers.values():
        real = quantizer.end_forward

        def twice(*args: Any, real: Any = real, table: Any = quantizer.forward_table, **kwargs: Any) -> None:
            real(*args, **kwargs)
            table.history = torch.roll(table.history, -1, 0)

        quantizer.end_forward = twice


def _amaxes_not_reduced(engine: Any) -> None:
    for quantizer in engine.emulation.quantizers.values():
        for table in (quantizer.forward_table, quantizer.backward_table):
            real = table.update
            table.update = lambda *args, real=real, **kwargs: real(None)


def _bytes_of_one_tensor(engine: Any) -> None:
    randomness = engine.emulation.randomness
    real = randomness.bytes
    randomness.bytes = lambda shape, name: real(shape, "one")


def _bytes_of_one_step(engine: Any) -> None:
    randomness = engine.emulation.randomness
    real = randomness.begin
    randomness.begin = lambda step: real(0)


def _stochastic_zeros(engine: Any) -> None:
    import mpbridge.numerics.nvfp4 as module

    real = module.values_stochastic
    c.replaced(engine, module, "values_stochastic", lambda *args, **kwargs: real(*args, **kwargs).zero_())


def _nearest_scale(real: Any, x: torch.Tensor, **how: Any) -> Any:
    """Block scales rounded to the nearest power of two: in half of the blocks the largest elements saturate."""
    wide = x.detach().float()
    blocks = wide.reshape(*wide.shape[:-1], -1, 32)
    peaks = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    most = 448.0 * torch.exp2(torch.round(torch.log2(peaks / 448.0)))
    return real(blocks.clamp(-most, most).reshape(wide.shape).to(x.dtype), **how)


def _saturates_early(real: Any, x: torch.Tensor, **how: Any) -> Any:
    """Codes from 256 on become the largest one."""
    wide = x.detach().float()
    peak = wide.abs().amax()
    return real(torch.where(wide.abs() >= peak * (256 / 448), wide.sign() * peak, wide).to(x.dtype), **how)


def _half_away(real: Any, x: torch.Tensor, **how: Any) -> Any:
    """Ties are rounded away from zero: every element grows by a little more than nothing first."""
    wide = x.detach().float()
    peak = wide.view(-1)[wide.abs().argmax()].clone()
    more = wide * (1 + 2.0**-12)
    more.view(-1)[wide.abs().argmax()] = peak
    return real(more, **how)


# --- what a step computes -----------------------------------------------------------------------------------------------------------------
def _probabilities_rounded(engine: Any) -> None:
    for layer in f.gpt(engine).decoder.layers:
        f.changed(layer.mlp.router, "routing", f.narrow)


FAULTS = (
    Fault("deepspeedai/DeepSpeed#1800", "micro-batches are summed in BF16", between_micro_batches(f.narrow), ("ddp", "dist")),
    Fault("NVIDIA/Megatron-LM#6660", "gradients doubled in every micro-batch", between_micro_batches(lambda grad: grad * 2), ("ddp", "dist")),
    Fault("linkedin/Liger-Kernel#950", "gradients of norms summed in BF16", f.change_gradients(f.narrow, "layernorm.weight"), ("ddp", "fsdp2", "fp32")),
    Fault("NVIDIA/Megatron-LM#1446", "the final norm's gradient is not summed over the sequence", _summed_over_sequence, ("sequence parallel",), ranks=2),
    Fault("NVIDIA/Megatron-LM#844", "tied ends of a pipeline keep their own gradients", _tied_ends_apart, ("pipeline",), ranks=2),
    Fault("verl-project/verl-SpeCo#29", "gradients divided by the ranks twice", f.change_gradients(lambda grad: grad * 0.5, ""), ("fsdp2", "fsdp2 a"), ranks=2),
    Fault("pytorch/torchtitan#1551", "experts' gradients divided by another number of ranks", _experts_divided, ("experts apart",), ranks=2),
    Fault("ServiceNow/Fast-LLM#542", "weight decay on norms", _norms_decayed, ("ddp", "dist")),
    Fault("tenstorrent/tt-metal#53212", "bias correction of another number of updates", _other_count, ("ddp", "dist", "fsdp2"), early=False),
    Fault("KempnerInstitute/KempnerForge#114", "moments rounded to BF16 once", _moments_rounded_once, ("ddp", "fsdp2", "mfsdp"), early=False),
    Fault("thinking-machines-lab/tinker-feedback#127", "moments empty once", _moments_empty_once, ("ddp", "fsdp2", "mfsdp"), early=False),
    Fault("NVIDIA-NeMo/RL#3788", "some gradients count twice in the norm", _norms_counted_twice, ("ddp", "dist")),
    Fault("modelscope/twinkle#290", "the norm is summed over replicas", lambda engine: f.changed(engine.optimizer, "get_grad_norm", lambda norm: norm * 2**0.5), ("ddp",), ranks=2),
    Fault("areal-project/AReaL#312", "every rank clips by the norm of its shard", _norm_of_a_shard, ("dist",), ranks=2),
    Fault("facebookresearch/fairscale#180", "one rank skips a step alone", _skips_alone, ("fp16", "dist"), ranks=2),
    Fault("karpathy/nanochat#304", "eps is added before the bias correction", _eps_before_correction, ("ddp", "dist", "fsdp2")),
    Fault("ml-explore/mlx#1640", "no bias correction", _no_bias_correction, ("ddp", "aware")),
    Fault("apple/axlearn#218", "weight decay goes through the moments", _decay_in_the_moments, ("ddp", "aware")),
    Fault("NVIDIA/Megatron-LM#7538", "recomputed activations are not quantized", _recomputed_unquantized, ("tensorwise recomputed",)),
    Fault("facebookresearch/fairscale#1199", "recomputed under another autocast", _recomputed_in_fp16, ("recomputed",)),
    Fault("NVIDIA/TransformerEngine#1190", "scales of gradients are never updated", _gradient_scales_frozen, ("delayed", "delayed recomputed")),
    Fault("NVIDIA/TransformerEngine#415", "amax histories move twice in a step", _history_rolled_twice, ("delayed", "delayed recomputed")),
    Fault("AMD-AGI/Primus#669", "amaxes are not reduced over ranks", _amaxes_not_reduced, ("delayed",), ranks=2),
    Fault("karpathy/llm.c#597", "every tensor draws the same bytes", _bytes_of_one_tensor, ("nvfp4",)),
    Fault("AMD-AGI/Primus-Turbo#365", "every step draws the same bytes", _bytes_of_one_step, ("nvfp4",)),
    Fault("NVIDIA/TransformerEngine#3281", "stochastic rounding gives zeros", _stochastic_zeros, ("nvfp4",)),
    Fault("ml-explore/mlx#4353", "block scales rounded to the nearest", h.operands_of("fprop", "x", _nearest_scale), ("mxfp8",)),
    Fault("sgl-project/sglang#40581", "E4M3 saturates from 256 on", h.operands_of("fprop", "x", _saturates_early), ("tensorwise",)),
    Fault("sgl-project/sglang#40581 (2)", "ties of E4M3 are rounded away from zero", h.operands_of("fprop", "x", _half_away), ("tensorwise", "mxfp8")),
    Fault("ViperEkura/AstrAI#57", "routing probabilities rounded to BF16", _probabilities_rounded, ("moe",)),
)  # fmt: skip
