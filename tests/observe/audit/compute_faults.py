"""Faults to plant in what a step computes: dtypes of operations, and quantization."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.observe.audit.faults import changed, given, gpt, instead, linear, narrow, nothing


# --- compute -------------------------------------------------------------------------------------------------------------------------------
@given
def linear_in(engine: Any, dtype: torch.dtype) -> None:
    def forward(real: Any, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # the parameter's own dtype says nothing: Megatron-FSDP's is the main weight's before the first step
        return real(input.to(dtype), weight.to(dtype), *args, **kwargs).to(input.dtype)

    instead(linear(engine), "_forward_impl", forward)


@given
def attention_in(engine: Any, dtype: torch.dtype) -> None:
    def forward(real: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return real(query.to(dtype), key.to(dtype), value.to(dtype), *args, **kwargs).to(query.dtype)

    instead(linear(engine, "self_attention.core_attention"), "forward", forward)


def mlps(engine: Any) -> list[Any]:
    return [layer.mlp for layer in gpt(engine).decoder.layers]


def activation_in_fp16(engine: Any) -> None:
    for mlp in mlps(engine):
        instead(mlp, "activation_func", lambda real, x: real(x.half()).to(x.dtype))


def router_reads_e5m2(engine: Any) -> None:
    for mlp in mlps(engine):
        mlp.router.register_forward_pre_hook(lambda module, args: (args[0].to(torch.float8_e5m2).to(args[0].dtype), *args[1:]))  # fmt: skip


def embedding_rounded(engine: Any) -> None:
    changed(gpt(engine).embedding, "forward", narrow)


@given
def hook_on_gradients(engine: Any, dtype: torch.dtype, name: str = "word_embeddings.weight") -> None:
    """Gradients pass through a narrower dtype before anything reads them."""
    for full, parameter in engine.named_parameters():
        if full.endswith(name) and parameter.requires_grad:
            parameter.register_hook(lambda grad: grad.to(dtype).to(grad.dtype))


def output_gradient_rounded(engine: Any) -> None:
    """What comes back to the embedding is rounded to BF16 on its way."""

    def hook(out: torch.Tensor) -> torch.Tensor:
        if out.requires_grad:  # not in an evaluation
            out.register_hook(narrow)
        return out

    changed(gpt(engine).embedding, "forward", hook)


def router_in_bf16(engine: Any) -> None:
    for mlp in mlps(engine):
        mlp.router.config.moe_router_dtype = None


def router_logits_rounded(engine: Any) -> None:
    for mlp in mlps(engine):
        changed(mlp.router, "gating", narrow)


def routed_in_bf16(engine: Any) -> None:
    for mlp in mlps(engine):
        instead(mlp.router, "routing", lambda real, logits, *args, **more: real(logits.bfloat16(), *args, **more))


def probabilities_rounded(engine: Any) -> None:
    for mlp in mlps(engine):
        changed(mlp.router, "routing", narrow)


def softmax_flag_off(engine: Any) -> None:
    for layer in gpt(engine).decoder.layers:
        layer.self_attention.core_attention.scale_mask_softmax.softmax_in_fp32 = False


def softmax_by_hand(engine: Any) -> None:
    """In BF16, by other operations than a softmax."""

    def forward(scores: torch.Tensor, mask: Any, *args: Any) -> torch.Tensor:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        narrow = scores.bfloat16().masked_fill(future, -1e4)
        weights = (narrow - narrow.amax(-1, keepdim=True)).exp()
        return (weights / weights.sum(-1, keepdim=True)).to(scores.dtype)

    linear(engine, "self_attention.core_attention").scale_mask_softmax.forward = forward


def attention_reads_e5m2(engine: Any) -> None:
    def forward(real: Any, q: torch.Tensor, k: torch.Tensor, *args: Any, **more: Any) -> Any:
        return real(*(one.to(torch.float8_e5m2).to(one.dtype) for one in (q, k)), *args, **more)

    instead(linear(engine, "self_attention.core_attention"), "forward", forward)


def stream_rounded(engine: Any) -> None:
    gpt(engine).decoder.layers[0].register_forward_hook(lambda module, args, output: narrow(output))


def stream_rounded_before_norm(engine: Any) -> None:
    gpt(engine).decoder.layers[1].input_layernorm.register_forward_pre_hook(lambda module, args: narrow(args))


def loss_in_bf16(engine: Any) -> None:
    model = gpt(engine)

    def loss(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        flat = logits.transpose(0, 1).reshape(-1, logits.shape[-1]).bfloat16()
        losses = torch.nn.functional.cross_entropy(flat, labels.reshape(-1), reduction="none")
        return losses.view(labels.shape).clone()  # FSDP2 warns of a view

    model.compute_language_model_loss = loss


def loss_rounded_afterwards(engine: Any) -> None:
    changed(gpt(engine), "compute_language_model_loss", narrow)


def logits_narrow(engine: Any) -> None:
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce as plain

    gpt(engine).output_layer._forward_impl = plain


def angles_in_bf16(engine: Any) -> None:
    rotary = gpt(engine).rotary_pos_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16()


def angles_rounded(engine: Any) -> None:
    rotary = gpt(engine).rotary_pos_emb
    rotary.inv_freq = narrow(rotary.inv_freq)


def weights_rounded_in_forward(engine: Any) -> None:
    instead(
        linear(engine),
        "_forward_impl",
        lambda real, input, weight, *args, **kw: real(input, narrow(weight), *args, **kw),
    )


@given
def tied_weight(engine: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The output layer multiplies by what `change` makes of the embedding's parameter."""
    changed(gpt(engine), "shared_embedding_or_output_weight", change)


def stale_tied_weight(engine: Any) -> None:
    kept: list[torch.Tensor] = []

    def stale(weight: torch.Tensor) -> torch.Tensor:
        kept.append(weight.detach().clone())
        return weight + (kept[0] - weight).detach()

    tied_weight(stale)(engine)


def another_layers_weight(engine: Any) -> None:
    other = linear(engine, layer=0)
    instead(
        linear(engine), "_forward_impl", lambda real, input, weight, *args, **kw: real(input, other.weight, *args, **kw)
    )


def activations_rounded(engine: Any) -> None:
    linear(engine, "mlp.linear_fc2").register_forward_pre_hook(lambda module, args: (narrow(args[0]), *args[1:]))


def autocast_on(engine: Any) -> None:
    engine.train_step = torch.autocast("cpu", dtype=torch.bfloat16)(engine.train_step)


def autocast_off(engine: Any) -> None:
    def step(real: Any, *args: Any, **kwargs: Any) -> Any:
        enter = torch.autocast.__enter__

        def disabled(self: Any) -> Any:
            self._enabled = False
            return enter(self)

        torch.autocast.__enter__ = disabled
        try:
            return real(*args, **kwargs)
        finally:
            torch.autocast.__enter__ = enter

    instead(engine, "train_step", step)


# --- quantization --------------------------------------------------------------------------------------------------------------------------
def paused(engine: Any) -> None:
    engine.emulation.is_paused = True


def unplugged(engine: Any) -> None:
    linear(engine).plug = None


def all_unplugged(engine: Any) -> None:
    for module in engine.emulation.plugged():
        module.plug = None


def edge_quantized(engine: Any) -> None:
    """A linear of the first layer, which stays in BF16, gets what its twin in the middle has."""
    edge, middle = linear(engine, layer=0), linear(engine, layer=1)
    edge.__class__, edge.plug = type(middle), middle.plug


@given
def another_scaling(engine: Any, name: str) -> None:
    from mpbridge.precision.scalings import SCALINGS

    for quantizer in engine.emulation.quantizers.values():
        quantizer.quant = dataclasses.replace(quantizer.quant, scaling=name)
        quantizer.rule = SCALINGS[name].emulation


def forward_swapped(engine: Any) -> None:
    module = linear(engine)
    module._forward_impl = lambda input, weight, *args, **kwargs: torch.nn.functional.linear(input, weight)


def class_swapped(engine: Any) -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    linear(engine).__class__ = ColumnParallelLinear


def unquantized(real: Any, x: torch.Tensor, **how: Any) -> Any:
    from mpbridge.numerics.quantizer import Operand

    return Operand(x.bfloat16(), None)


@given
def wrong_format(engine: Any, number: str, *, gradient: bool) -> None:
    from mpbridge.common.formats import FORMATS

    for quantizer in engine.emulation.quantizers.values():
        setattr(quantizer, "gradient_format" if gradient else "forward_format", FORMATS[number])


def scales_frozen(engine: Any) -> None:
    for quantizer in engine.emulation.quantizers.values():
        quantizer.end_forward = quantizer.end_backward = nothing


def tables(engine: Any) -> list[Any]:
    """Of delayed scaling."""
    quantizers = engine.emulation.quantizers.values()
    return [table for quantizer in quantizers for table in (quantizer.forward_table, quantizer.backward_table)]


@given
def detail(engine: Any, **changes: Any) -> None:
    """Other details of the rule, in the quantizer and its tables, under the same name."""
    for table in tables(engine):
        table.quant = dataclasses.replace(table.quant, **changes)


def history_cut(engine: Any) -> None:
    for table in tables(engine):
        table.history = table.history[:4].clone()


def not_rotated(engine: Any) -> None:
    import mpbridge.numerics.nvfp4 as module

    replaced(engine, module, "rotate", lambda x, **options: x)


def rounded_to_nearest(engine: Any) -> None:
    import mpbridge.numerics.nvfp4 as module
    from mpbridge.common.formats import E2M1

    def nearest(view: Any, multiplier: Any, factor: Any, random: Any, out: Any) -> Any:
        return module.values(view, multiplier, factor, E2M1, out)

    replaced(engine, module, "values_stochastic", nearest)


def rounded_upwards(engine: Any) -> None:
    changed(engine.emulation.randomness, "bytes", lambda drawn: drawn | 0xC0)


def bytes_of_one_step(engine: Any) -> None:
    instead(engine.emulation.randomness, "begin", lambda real, step: real(1000))  # a step that no run here takes


def replaced(engine: Any, owner: Any, name: str, value: Any) -> None:
    """Replaced until the engine is closed."""
    engine.undo.append(SimpleNamespace(owner=owner, name=name, value=getattr(owner, name)))
    setattr(owner, name, value)
