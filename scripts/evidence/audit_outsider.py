"""Thirty-nine faults thought of by somebody who had not read the audit's catalogue, from what goes wrong in trainings: planted by audit_faults.py to see whether the audit's promises are general."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from audit_blind import ENGINES, Fault

from tests.observe.audit import compute_faults as c
from tests.observe.audit import faults as f
from tests.observe.audit import hostile_faults as h

__all__ = ["ENGINES", "FAULTS"]
Tensor = torch.Tensor


def through(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Tensors by way of a narrower dtype, back in their own."""

    def change(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(change, value))
        whole = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype).to(value.dtype) if whole else value

    return change


FP16, E5M2, BF16 = through(torch.float16), through(torch.float8_e5m2), through(torch.bfloat16)


def layers(engine: Any) -> Any:
    return f.gpt(engine).decoder.layers


def before_update(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Within the step, right before the inner optimizer updates."""
    return lambda engine: f.around(f.inner(engine), "step", lambda: change(engine))


def once(change: Callable[[Tensor], Tensor], *names: str) -> Callable[[Any], None]:
    """Between two steps: moments, or what the optimizer updates for no name."""

    def plant(engine: Any) -> None:
        tensors = (
            [state[name] for state in f.states(engine) for name in names]
            if names
            else [one.data for one in f.updated(engine)]
        )
        with torch.no_grad():
            for one in tensors:
                one.copy_(change(one))

    return plant  # fmt: skip


# --- what a step computes ------------------------------------------------------------------------------------------------------------------
def _embedding_rounded(engine: Any) -> None:
    f.changed(f.gpt(engine).embedding, "forward", BF16)


def _activation_in_fp16(engine: Any) -> None:
    for layer in layers(engine):
        real = layer.mlp.activation_func
        layer.mlp.activation_func = lambda x, real=real: real(x.half()).to(x.dtype)


def _router_reads_e5m2(engine: Any) -> None:
    for layer in layers(engine):
        layer.mlp.router.register_forward_pre_hook(lambda module, args: (E5M2(args[0]), *args[1:]))


def _softcapped_in_fp16(engine: Any) -> None:
    def cap(out: Any) -> Any:
        return (30 * torch.tanh(out[0].half() / 30)).to(out[0].dtype), *out[1:]

    f.changed(f.gpt(engine).output_layer, "forward", cap)


def _attention_by_hand(engine: Any) -> None:
    """A library's own attention: products and softmax in FP16."""
    for layer in layers(engine):

        def forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            q, k, v = (one.permute(1, 2, 0, 3).half() for one in (query, key, value))
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            out = (scores.masked_fill(mask, -6e4).softmax(-1) @ v).permute(2, 0, 1, 3)
            return out.reshape(*out.shape[:2], -1).to(query.dtype)

        layer.self_attention.core_attention.forward = forward


def _stream_in_fp16(engine: Any) -> None:
    layers(engine)[0].register_forward_hook(lambda module, args, output: FP16(output))


def _projections_in_fp64(engine: Any) -> None:
    """Somebody looked for an error and left it there."""
    c.linear_in(torch.float64)(engine)


# --- operands of quantized products --------------------------------------------------------------------------------------------------------
def _scale_of_the_last_batch(real: Any, x: Tensor, **how: Any) -> Any:
    """What is larger than the previous micro-batch's largest element saturates."""
    kept = _LAST.setdefault((id(real.__self__), how["gemm"], how["side"], tuple(x.shape)), [])
    most = kept[-1] if kept else x.detach().abs().amax()
    kept[:] = [x.detach().abs().amax() * 0.5]
    return real(x.detach().clamp(-most, most), **how)


_LAST: dict[Any, list[Tensor]] = {}


def _input_of_the_last_batch(real: Any, x: Tensor, **how: Any) -> Any:
    kept = _LAST.setdefault((id(real.__self__), how["gemm"], how["slot"], tuple(x.shape)), [])
    now = x.detach().clone()
    old = kept[-1] if kept else now.roll(1, 0)
    kept[:] = [now]
    return real(old, **how)


def _as_if_transposed(real: Any, x: Tensor, **how: Any) -> Any:
    """Quantized along the other axis first, as if one copy served both directions."""
    turned = x.detach().float().t().contiguous()
    blocks = turned.reshape(*turned.shape[:-1], -1, 32)
    scale = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30))) - 8)
    rounded = ((blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).reshape(turned.shape)
    return real(rounded.t().contiguous().to(x.dtype), **how)


def _fnuz(real: Any, x: Tensor, **how: Any) -> Any:
    """E4M3 as another vendor has it, whose largest number is 240: a part of the range is never used."""
    wide = x.detach().float()
    factor = 240 / wide.abs().amax().clamp_min(1e-30)
    return real(((wide * factor).to(torch.float8_e4m3fnuz).float() / factor).to(x.dtype), **how)


def _upwards(engine: Any) -> None:
    """Stochastic rounding whose bytes are never small."""
    randomness = engine.emulation.randomness
    real = randomness.bytes
    randomness.bytes = lambda *args, **kwargs: real(*args, **kwargs) | 0xC0


def _tables_swapped(engine: Any) -> None:
    """Two linears read each other's scales."""
    for quantizer in engine.emulation.quantizers.values():
        real = quantizer.forward_table.update

        def update(*args: Any, table: Any = quantizer.forward_table, real: Any = real, **kwargs: Any) -> None:
            real(*args, **kwargs)
            table.scale = table.scale.roll(2, 0)

        quantizer.forward_table.update = update


# --- gradients ------------------------------------------------------------------------------------------------------------------------------
def _first_batch_lost(engine: Any) -> None:
    """zero_grad between micro-batches, once too often."""
    count = [0]

    def act(*_: Any) -> None:
        count[0] += 1
        if count[0] % 2 == 0:
            for _, p in engine.named_parameters():
                for grad in (getattr(p, "main_grad", None), p.grad):
                    if isinstance(grad, Tensor):
                        grad.zero_()

    engine.model[0].register_forward_pre_hook(act)


def _hook_rounds(engine: Any) -> None:
    """A hook on every parameter, as libraries for communication install them."""
    for _, p in engine.named_parameters():
        if p.requires_grad:
            p.register_hook(E5M2)


def _buffers_alias(engine: Any) -> None:
    """Two layers add up their gradients in one place."""
    one, two = (f.linear(engine, layer=number).weight for number in (0, 1))
    two.main_grad = one.main_grad


def _clipped_each(engine: Any) -> None:
    """Every gradient is cut to the limit alone, and then all together."""

    def act() -> None:
        for _, p in engine.named_parameters():
            norm = p.main_grad.norm()
            p.main_grad.mul_((0.05 / (norm + 1e-6)).clamp(max=1.0))

    f.after(engine.configs.model, "finalize_model_grads_func", act)


def _norm_of_the_largest(engine: Any) -> None:
    f.changed(engine.optimizer, "get_grad_norm", lambda norm: max(float(p.main_grad.abs().max()) for _, p in engine.named_parameters()))  # fmt: skip


def _norms_not_reduced(engine: Any) -> None:
    """The gradients of norms stay this rank's own."""
    mine: dict[str, Tensor] = {}

    def enters() -> Callable[[], None]:
        own = [(name, p) for name, p in engine.named_parameters() if "layernorm" in name]
        mine.update({name: p.main_grad.clone() for name, p in own})
        return lambda: [p.main_grad.copy_(mine[name]) for name, p in own] and None

    f.around(engine.configs.model, "finalize_model_grads_func", enters)


def _embedding_in_fp16_on_rank_1(engine: Any) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        f.change_gradients(FP16, "word_embeddings.weight")(engine)


def _summed_not_averaged(engine: Any) -> None:
    f.change_gradients(lambda grad: grad * torch.distributed.get_world_size(), "")(engine)


# --- the optimizer --------------------------------------------------------------------------------------------------------------------------
def _decayed_twice(engine: Any) -> None:
    for own in f.updated(engine):
        own.data.mul_(1 - 1e-3 * 0.01)


def _layerwise_rate(engine: Any) -> None:
    """Later layers move less, by a library's own rule."""

    def enters() -> Callable[[], None]:
        own = f.largest(engine)
        old = own.detach().clone()

        def leaves() -> None:
            own.data.copy_(old + 0.9 * (own.data - old))

        return leaves

    f.around(f.inner(engine), "step", enters)


def _stepped_twice(engine: Any) -> None:
    optimizer = f.inner(engine)
    real = optimizer.step
    optimizer.step = lambda *args, **kwargs: (real(*args, **kwargs), real(*args, **kwargs))[0]


def _moments_alias(engine: Any) -> None:
    def act(engine: Any) -> None:
        state = max(f.states(engine), key=lambda one: one["exp_avg"].numel())
        state["exp_avg_sq"] = state["exp_avg"]

    act(engine)


def _offloaded(engine: Any) -> None:
    """Moments rest in BF16 between steps, and are wide again when a step begins."""

    def enters() -> None:
        for state in f.states(engine):
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(BF16(state[name]))

    f.around(f.inner(engine), "step", enters)


def _restored_late(engine: Any) -> None:
    """Moments come back from where they were put one step ago."""
    kept: list[list[Tensor]] = []

    def enters() -> Callable[[], None]:
        own = [state[name] for state in f.states(engine) for name in ("exp_avg", "exp_avg_sq")]
        if kept:
            for now, old in zip(own, kept[-1], strict=False):
                now.copy_(old)
        old = [one.clone() for one in own]
        return lambda: kept.append(old)

    kept.append([state[name] * 0.9 for state in f.states(engine) for name in ("exp_avg", "exp_avg_sq")])
    f.around(f.inner(engine), "step", enters)


def _count_starts_again(engine: Any) -> None:
    for group in f.inner(engine).param_groups:
        if "step" in group:
            group["step"] = 0
    for state in f.states(engine):
        if "step" in state:
            state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], Tensor) else 0


def _averaged_with_the_first(engine: Any) -> None:
    """A moving average of weights is written to the weights that train."""
    average = [own.detach().clone() for own in f.updated(engine)]

    def act() -> None:
        for own, old in zip(f.updated(engine), average, strict=True):
            own.data.lerp_(old, 0.01)

    f.stepping(engine, act)


def _maximizes(engine: Any) -> None:
    optimizer = f.inner(engine)

    def enters() -> Callable[[], None]:
        own = f.updated(engine)
        old = [one.detach().clone() for one in own]
        return lambda: [p.data.copy_(2 * was - p.data) for p, was in zip(own, old, strict=True)] and None

    f.around(optimizer, "step", enters)


def _groups(**values: Any) -> Callable[[Any], None]:
    def plant(engine: Any) -> None:
        for group in f.inner(engine).param_groups:
            group.update(values)

    return plant


def _rate_halved(engine: Any) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] *= 0.5


# --- weights --------------------------------------------------------------------------------------------------------------------------------
def _parameters_alias(engine: Any) -> None:
    """Two norms share their storage."""
    one, two = (layers(engine)[number].pre_mlp_layernorm.weight for number in (0, 1))
    two.data = one.data


def _forward_in_e4m3(engine: Any) -> None:
    """A library replaces the forward weights of one layer by what it quantized, after every update."""
    weight = f.linear(engine).weight

    def act() -> None:
        weight.data.copy_(through(torch.float8_e4m3fn)(weight.data))

    act()
    f.after(engine, "train_step", act)


def _main_weights_from_model(engine: Any) -> None:
    """Between two steps the main weights are made anew from the 16-bit parameters."""
    for part in f.parts(engine):
        part.reload_model_params()


def outsider(name: str, plant: Callable[[Any], None], engines: tuple[str, ...], **how: Any) -> Fault:
    return Fault("", name, plant, engines, **how)


FAULTS = (
    outsider("embedding's output through BF16", _embedding_rounded, ("fp32",)),
    outsider("activation function in FP16", _activation_in_fp16, ("ddp", "fsdp2")),
    outsider("router reads its input through E5M2", _router_reads_e5m2, ("moe",)),
    outsider("logits capped in FP16", _softcapped_in_fp16, ("ddp", "fp32")),
    outsider("another attention, in FP16", _attention_by_hand, ("ddp", "fsdp2")),
    outsider("residual stream through FP16", _stream_in_fp16, ("fp32", "residual")),
    outsider("a projection in FP64", _projections_in_fp64, ("ddp",)),
    outsider("scale of the previous micro-batch", h.operands_of("fprop", "x", _scale_of_the_last_batch), ("tensorwise", "mxfp8")),
    outsider("wgrad reads the previous micro-batch", h.operands_of("wgrad", "x", _input_of_the_last_batch), ("tensorwise", "mxfp8", "nvfp4")),
    outsider("one copy quantized for both directions", h.operands_of("wgrad", "x", _as_if_transposed), ("mxfp8",)),
    outsider("E4M3 with 240 as its largest number", h.operands_of("fprop", "w", _fnuz), ("tensorwise", "delayed")),
    outsider("stochastic rounding upwards", _upwards, ("nvfp4",)),
    outsider("linears read each other's scales", _tables_swapped, ("delayed",)),
    outsider("the first micro-batch is lost", _first_batch_lost, ("ddp", "fsdp2")),
    outsider("a hook rounds every gradient to E5M2", _hook_rounds, ("ddp", "fsdp2")),
    outsider("gradients through FP16 without a scale", f.change_gradients(FP16, ""), ("ddp", "mfsdp")),
    outsider("two layers share a gradient buffer", _buffers_alias, ("ddp", "dist")),
    outsider("every gradient is clipped alone", _clipped_each, ("ddp",)),
    outsider("clipped by the largest element", _norm_of_the_largest, ("ddp", "dist")),
    outsider("gradients of norms are not reduced", _norms_not_reduced, ("ddp",), ranks=2),
    outsider("the embedding's gradient through FP16 on one rank", _embedding_in_fp16_on_rank_1, ("ddp", "dist"), ranks=2),
    outsider("gradients summed over ranks", _summed_not_averaged, ("ddp", "dist"), ranks=2),
    outsider("decayed twice", before_update(_decayed_twice), ("ddp", "dist", "fsdp2")),
    outsider("one weight has another rate", _layerwise_rate, ("ddp", "fsdp2", "mfsdp")),
    outsider("every update is made twice", _stepped_twice, ("ddp", "fsdp2")),
    outsider("both moments are one tensor", _moments_alias, ("ddp", "fsdp2"), early=False),
    outsider("moments rest in BF16", _offloaded, ("ddp", "fsdp2", "mfsdp"), early=False),
    outsider("moments come back a step late", _restored_late, ("ddp", "fsdp2"), early=False),
    outsider("updates are counted anew", _count_starts_again, ("ddp", "fsdp2"), early=False),
    outsider("an average is written to the weights", _averaged_with_the_first, ("ddp", "fsdp2", "mfsdp"), early=False),
    outsider("the update has the other sign", _maximizes, ("ddp", "fsdp2")),
    outsider("a library's own eps and beta2", _groups(eps=1e-6, betas=(0.9, 0.95)), ("ddp", "fsdp2", "mfsdp")),
    outsider("the rate is halved beside its schedule", _rate_halved, ("ddp", "dist", "fsdp2")),
    outsider("norms share their storage", _parameters_alias, ("ddp",)),
    outsider("forward weights in E4M3", _forward_in_e4m3, ("ddp", "dist")),
    outsider("main weights made anew from the model", _main_weights_from_model, ("ddp", "dist"), early=False),
    outsider("main weights through FP16, once", once(FP16), ("ddp", "fsdp2", "fp32"), early=False),
    outsider("moments through E5M2, once", once(E5M2, "exp_avg", "exp_avg_sq"), ("ddp", "fsdp2"), early=False),
    outsider("the first moment halved, once", once(lambda one: one * 0.5, "exp_avg"), ("ddp", "fsdp2", "mfsdp"), early=False),
)  # fmt: skip
