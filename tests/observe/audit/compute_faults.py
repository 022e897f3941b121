"""Faults to plant in what a step computes: dtypes of operations, and quantization."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.observe.audit.faults import changed, gpt, linear, narrow, nothing


# --- compute -------------------------------------------------------------------------------------------------------------------------------
def linear_in(dtype: torch.dtype) -> Callable[[Any], None]:
    def plant(engine: Any) -> None:
        module = linear(engine)
        real = module._forward_impl

        def forward(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            # the parameter's own dtype says nothing: Megatron-FSDP's is the main weight's before the first step
            return real(input.to(dtype), weight.to(dtype), *args, **kwargs).to(input.dtype)

        module._forward_impl = forward

    return plant


def attention_in(dtype: torch.dtype) -> Callable[[Any], None]:
    def plant(engine: Any) -> None:
        attention = linear(engine, "self_attention.core_attention")
        real = attention.forward

        def forward(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            return real(query.to(dtype), key.to(dtype), value.to(dtype), *args, **kwargs).to(query.dtype)

        attention.forward = forward

    return plant


def activation_in_fp16(engine: Any) -> None:
    for layer in gpt(engine).decoder.layers:
        real = layer.mlp.activation_func
        layer.mlp.activation_func = lambda x, real=real: real(x.half()).to(x.dtype)


def router_reads_e5m2(engine: Any) -> None:
    def act(module: Any, args: Any) -> Any:
        return args[0].to(torch.float8_e5m2).to(args[0].dtype), *args[1:]

    for layer in gpt(engine).decoder.layers:
        layer.mlp.router.register_forward_pre_hook(act)


def embedding_rounded(engine: Any) -> None:
    changed(gpt(engine).embedding, "forward", narrow)


def hook_on_gradients(dtype: torch.dtype, name: str = "word_embeddings.weight") -> Callable[[Any], None]:
    """Gradients pass through a narrower dtype before anything reads them."""

    def plant(engine: Any) -> None:
        for full, parameter in engine.named_parameters():
            if full.endswith(name) and parameter.requires_grad:
                parameter.register_hook(lambda grad: grad.to(dtype).to(grad.dtype))

    return plant


def output_gradient_rounded(engine: Any) -> None:
    """What comes back to the embedding is rounded to BF16 on its way."""

    def hook(out: torch.Tensor) -> torch.Tensor:
        if out.requires_grad:  # not in an evaluation
            out.register_hook(narrow)
        return out

    changed(gpt(engine).embedding, "forward", hook)


def router_in_bf16(engine: Any) -> None:
    for layer in gpt(engine).decoder.layers:
        layer.mlp.router.config.moe_router_dtype = None


def router_logits_rounded(engine: Any) -> None:
    for layer in gpt(engine).decoder.layers:
        changed(layer.mlp.router, "gating", narrow)


def routed_in_bf16(engine: Any) -> None:
    for layer in gpt(engine).decoder.layers:
        router = layer.mlp.router
        router.routing = lambda logits, *args, real=router.routing, **more: real(logits.bfloat16(), *args, **more)


def probabilities_rounded(engine: Any) -> None:
    for layer in gpt(engine).decoder.layers:
        changed(layer.mlp.router, "routing", narrow)


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
    attention = linear(engine, "self_attention.core_attention")
    real = attention.forward
    to = torch.float8_e5m2
    attention.forward = lambda q, k, *args, **more: real(q.to(to).to(q.dtype), k.to(to).to(k.dtype), *args, **more)


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
    module = linear(engine)
    real = module._forward_impl
    module._forward_impl = lambda input, weight, *args, **kwargs: real(
        input, weight.bfloat16().float(), *args, **kwargs
    )


def tied_weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """The output layer multiplies by what `change` makes of the embedding's parameter."""

    def plant(engine: Any) -> None:
        changed(gpt(engine), "shared_embedding_or_output_weight", change)

    return plant


def stale_tied_weight(engine: Any) -> None:
    kept: list[torch.Tensor] = []

    def stale(weight: torch.Tensor) -> torch.Tensor:
        kept.append(weight.detach().clone())
        return weight + (kept[0] - weight).detach()

    tied_weight(stale)(engine)


def another_layers_weight(engine: Any) -> None:
    module, other = linear(engine, layer=1), linear(engine, layer=0)
    real = module._forward_impl
    module._forward_impl = lambda input, weight, *args, **kwargs: real(input, other.weight, *args, **kwargs)


def activations_rounded(engine: Any) -> None:
    linear(engine, "mlp.linear_fc2").register_forward_pre_hook(lambda module, args: (narrow(args[0]), *args[1:]))


def autocast_on(engine: Any) -> None:
    real = engine.train_step

    def step(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return real(*args, **kwargs)

    engine.train_step = step


def autocast_off(engine: Any) -> None:
    real = engine.train_step

    def step(*args: Any, **kwargs: Any) -> Any:
        enter = torch.autocast.__enter__

        def disabled(self: Any) -> Any:
            self._enabled = False
            return enter(self)

        torch.autocast.__enter__ = disabled
        try:
            return real(*args, **kwargs)
        finally:
            torch.autocast.__enter__ = enter

    engine.train_step = step


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


def another_scaling(name: str) -> Callable[[Any], None]:
    def plant(engine: Any) -> None:
        import dataclasses

        from mpbridge.precision.scalings import SCALINGS

        for quantizer in engine.emulation.quantizers.values():
            quantizer.quant = dataclasses.replace(quantizer.quant, scaling=name)
            quantizer.rule = SCALINGS[name].emulation

    return plant


def forward_swapped(engine: Any) -> None:
    module = linear(engine)
    module._forward_impl = lambda input, weight, *args, **kwargs: torch.nn.functional.linear(input, weight)


def class_swapped(engine: Any) -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    linear(engine).__class__ = ColumnParallelLinear


def unquantized(real: Any, x: torch.Tensor, **how: Any) -> Any:
    from mpbridge.numerics.quantizer import Operand

    return Operand(x.bfloat16(), None)


def wrong_format(number: str, *, gradient: bool) -> Callable[[Any], None]:
    def plant(engine: Any) -> None:
        from mpbridge.common.formats import FORMATS

        for quantizer in engine.emulation.quantizers.values():
            setattr(quantizer, "gradient_format" if gradient else "forward_format", FORMATS[number])

    return plant


def scales_frozen(engine: Any) -> None:
    for quantizer in engine.emulation.quantizers.values():
        quantizer.end_forward = quantizer.end_backward = nothing


def detail(**changes: Any) -> Callable[[Any], None]:
    """Other details of the rule, in the quantizer and its tables, under the same name."""

    def plant(engine: Any) -> None:
        import dataclasses

        for quantizer in engine.emulation.quantizers.values():
            for table in (quantizer.forward_table, quantizer.backward_table):
                table.quant = dataclasses.replace(table.quant, **changes)

    return plant


def history_cut(engine: Any) -> None:
    for quantizer in engine.emulation.quantizers.values():
        for table in (quantizer.forward_table, quantizer.backward_table):
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
    randomness = engine.emulation.randomness
    real = randomness.bytes
    randomness.bytes = lambda *args, **kwargs: real(*args, **kwargs) | 0xC0


def bytes_of_one_step(engine: Any) -> None:
    randomness = engine.emulation.randomness
    real = randomness.begin
    randomness.begin = lambda step: real(1000)  # a step that no run here takes


def replaced(engine: Any, owner: Any, name: str, value: Any) -> None:
    """Replaced until the engine is closed."""
    engine.undo.append(SimpleNamespace(owner=owner, name=name, value=getattr(owner, name)))
    setattr(owner, name, value)
