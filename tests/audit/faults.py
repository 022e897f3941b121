"""Faults to plant in a healthy engine: what each does, on which engines, and which row of the report has to name it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

SHARDED = {"use_distributed_optimizer": True}
AWARE = {"use_precision_aware_optimizer": True}
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
PLAIN = {"first_last_layers_bf16": False, "fp8_param": False}
SCALED = {"recipe": "fp16_mixed", "initial_loss_scale": 1024.0}

ENGINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddp": ("bf16", {}),
    "dist": ("bf16", {"ddp": SHARDED}),
    "aware": ("bf16", {"ddp": SHARDED, "optimizer": AWARE}),
    "fp32": ("fp32", {}),
    "fp16": (SCALED, {}),
    "moe": ({"recipe": "bf16_mixed", "moe_router_dtype": "fp32"}, {"model": MOE}),
    "residual": ({"recipe": "bf16_mixed", "fp32_residual_connection": True}, {}),
    "logits": ({"recipe": "bf16_mixed", "logit_dtype": "fp32"}, {}),
    "pipeline": ("bf16", {"parallel": {"pipeline_model_parallel_size": 2}}),
    "fsdp2": ("fp32_params_bf16_compute", {"engine": "fsdp2"}),
    "fsdp2 a": ("bf16_params_fp32_states", {"engine": "fsdp2"}),
    "mfsdp": ("bf16_megatron_fsdp", {"engine": "megatron_fsdp"}),
    "tensorwise": ({"recipe": "bf16_with_fp8_current_scaling_mixed", **PLAIN}, {"emulate": True}),
    "tensorwise ends": ("bf16_with_fp8_current_scaling_mixed", {"emulate": True, "model": {"num_layers": 3}}),
    "tensorwise fsdp2": ({"recipe": "bf16_with_fp8_current_scaling_mixed", **PLAIN}, {"emulate": True, "engine": "fsdp2"}),
    "delayed": ("bf16_with_fp8_delayed_scaling_mixed", {"emulate": True}),
    "mxfp8": ("bf16_with_mxfp8_mixed", {"emulate": True}),
    "nvfp4": ("bf16_with_nvfp4_mixed", {"emulate": True}),
}  # fmt: skip
ALL = ("ddp", "dist", "fsdp2", "mfsdp")
CORE = ("ddp", "dist")


@dataclass(frozen=True)
class Fault:
    """One fault."""

    name: str
    plant: Callable[[Any], None]
    engines: tuple[str, ...]
    subjects: tuple[str, ...]
    """Rows of the report that may name it; one of them must."""
    offender: str = ""
    """Part of an offender's name."""
    quick: bool = False
    """Whether the default suite plants it."""
    early: bool = True
    """False: it means something after the first update only."""


# --- ways in -------------------------------------------------------------------------------------------------------------------------------
def gpt(engine: Any) -> Any:
    model = engine.model[0]
    while hasattr(model, "module"):
        model = model.module
    return model


def linear(engine: Any, path: str = "mlp.linear_fc1", layer: int = 1) -> Any:
    module = gpt(engine).decoder.layers[layer]
    for part in path.split("."):
        module = getattr(module, part)
    return module


def inner(engine: Any) -> Any:
    from mpbridge.audit.flags import inner_optimizers

    return inner_optimizers(engine.optimizer)[0]


def parts(engine: Any) -> list[Any]:
    return list(engine.optimizer.chained_optimizers)


def after(owner: Any, name: str, then: Callable[..., Any]) -> None:
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        then()
        return result

    setattr(owner, name, call)


def stepping(engine: Any, then: Callable[[], None]) -> None:
    """`then` right after the inner optimizer's update, before anything is copied."""
    after(inner(engine), "step", then)


def states(engine: Any) -> list[dict[str, Any]]:
    return [state for state in inner(engine).state.values() if state]


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


# --- weights -------------------------------------------------------------------------------------------------------------------------------
def model_never_refreshed(engine: Any) -> None:
    if engine.name == "megatron_fsdp":
        engine.model[0].param_and_grad_buffer.copy_main_weights_to_model_weights = nothing
        return
    for part in parts(engine):
        part._copy_main_params_to_model_params = nothing


def one_weight_never_refreshed(engine: Any) -> None:
    weight = linear(engine).weight
    for part in parts(engine):
        kept = weight.detach().clone()
        after(part, "_copy_main_params_to_model_params", lambda kept=kept: weight.data.copy_(kept))


def weight_disturbed(engine: Any) -> None:
    """A forward weight gets noise that its main weight knows nothing of."""
    weight = linear(engine).weight

    def disturb() -> None:
        weight.data.view(-1)[5] += 0.125

    after(engine, "train_step", disturb)


def optimizer_frozen(engine: Any) -> None:
    if hasattr(engine.optimizer, "step_with_ready_grads"):
        engine.optimizer.step_with_ready_grads = lambda: True
    for part in parts(engine):
        getattr(part, "optimizer", part).step = nothing


def one_weight_frozen(engine: Any) -> None:
    optimizer = inner(engine)
    # the largest: its update is never below rounding
    target = max((p for group in optimizer.param_groups for p in group["params"]), key=lambda p: p.numel())
    real = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        kept = target.detach().clone()
        result = real(*args, **kwargs)
        target.data.copy_(kept)
        return result

    optimizer.step = step


def dropped_from_the_optimizer(engine: Any) -> None:
    inner(engine).param_groups[0]["params"].pop()


def rate_of_a_group_zero(engine: Any) -> None:
    inner(engine).param_groups[-1]["lr"] = 0.0


def requires_grad_off(engine: Any) -> None:
    linear(engine).weight.requires_grad_(False)


def cast_state(name: str, dtype: torch.dtype) -> Callable[[Any], None]:
    def plant(engine: Any) -> None:
        def cast() -> None:
            for state in states(engine)[:1]:
                state[name] = state[name].to(dtype)

        after(engine, "train_step", cast)

    return plant


def round_state(name: str) -> Callable[[Any], None]:
    def plant(engine: Any) -> None:
        def narrow() -> None:
            for state in states(engine):
                state[name].copy_(state[name].bfloat16().float())

        stepping(engine, narrow)

    return plant


def main_weights_rounded(engine: Any) -> None:
    def narrow() -> None:
        for group in inner(engine).param_groups:
            for p in group["params"]:
                p.data.copy_(p.data.bfloat16().float())

    stepping(engine, narrow)


def remainders_zeroed(engine: Any) -> None:
    def zero() -> None:
        for state in states(engine):
            state["master_param"].zero_()

    stepping(engine, zero)


def second_copy(engine: Any) -> None:
    def add() -> None:
        for p, state in inner(engine).state.items():
            state["master_param"] = p.detach().float().clone()

    after(engine, "train_step", add)


def norm_in_fp32(engine: Any) -> None:
    norm = gpt(engine).decoder.layers[0].input_layernorm
    norm.weight.data = norm.weight.data.float()
    norm.bias.data = norm.bias.data.float()


# --- gradients -----------------------------------------------------------------------------------------------------------------------------
def change_gradients(
    change: Callable[[torch.Tensor], torch.Tensor], name: str = "linear_fc1.weight"
) -> Callable[[Any], None]:
    """Changes accumulated gradients right before the optimizer looks at them."""

    def plant(engine: Any) -> None:
        def act(*args: Any, **kwargs: Any) -> None:
            for full, p in engine.named_parameters():
                if not full.endswith(name):
                    continue
                grad = getattr(p, "main_grad", None)
                grad = p.grad if grad is None else grad
                grad = getattr(grad, "_local_tensor", grad)
                grad.copy_(change(grad))

        config = engine.configs.model
        real = config.finalize_model_grads_func

        def finalize(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            act()
            return result

        config.finalize_model_grads_func = finalize

    return plant


def last_microbatch_only(engine: Any) -> None:
    from mpbridge.engines import steps

    model = engine.model[0]
    model.register_forward_pre_hook(lambda *_: model.zero_grad_buffer())
    assert steps


def clipping_lost(engine: Any) -> None:
    for part in parts(engine):
        part.config.clip_grad = 0.0
    engine.configs.optimizer.clip_grad = 1.0 if engine.configs.optimizer is not parts(engine)[0].config else 0.0


# --- loss scale ----------------------------------------------------------------------------------------------------------------------------
def loss_unscaled(engine: Any) -> None:
    engine.configs.model.grad_scale_func = lambda loss: loss


def no_scale_function(engine: Any) -> None:
    engine.configs.model.grad_scale_func = None


def unscaled_twice(engine: Any) -> None:
    for part in parts(engine):
        real = part._unscale_main_grads_and_check_for_nan

        def twice(real: Any = real) -> Any:
            real()
            return real()

        part._unscale_main_grads_and_check_for_nan = twice


def scale_of_one(engine: Any) -> None:
    for part in parts(engine):
        part.grad_scaler._scale.fill_(1.0)


def scaler_window(engine: Any) -> None:
    for part in parts(engine):
        part.grad_scaler.growth_interval = 7


def scale_drifts(engine: Any) -> None:
    def halve() -> None:
        for part in parts(engine):
            part.grad_scaler._scale.mul_(0.5)

    after(engine, "train_step", halve)


# --- flags ---------------------------------------------------------------------------------------------------------------------------------
def flip(target: str, field: str, value: Any) -> Callable[[Any], None]:
    def plant(engine: Any) -> None:
        from mpbridge.audit.flags import configs

        setattr(configs(engine)[target], field, value)

    return plant


def decoupled_flag(engine: Any) -> None:
    inner(engine).use_decoupled_grad = True
    type(inner(engine))


# --- compute -------------------------------------------------------------------------------------------------------------------------------
def linear_in(dtype: torch.dtype) -> Callable[[Any], None]:
    def plant(engine: Any) -> None:
        module = linear(engine)
        real, own = module._forward_impl, next(module.parameters()).dtype
        own = torch.bfloat16 if engine.name == "fsdp2" else own

        def forward(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return real(input.to(dtype), weight.to(dtype), *args, **kwargs).to(own)

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


def router_in_bf16(engine: Any) -> None:
    for layer in gpt(engine).decoder.layers:
        layer.mlp.router.config.moe_router_dtype = None


def stream_rounded(engine: Any) -> None:
    layer = gpt(engine).decoder.layers[0]

    def narrow(module: Any, args: Any, output: Any) -> Any:
        return tuple(o.bfloat16().to(o.dtype) if isinstance(o, torch.Tensor) else o for o in output)

    layer.register_forward_hook(narrow)


def stream_rounded_before_norm(engine: Any) -> None:
    norm = gpt(engine).decoder.layers[1].input_layernorm
    norm.register_forward_pre_hook(lambda module, args: tuple(a.bfloat16().to(a.dtype) for a in args))


def loss_in_bf16(engine: Any) -> None:
    model = gpt(engine)

    def loss(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        flat = logits.transpose(0, 1).reshape(-1, logits.shape[-1]).bfloat16()
        losses = torch.nn.functional.cross_entropy(flat, labels.reshape(-1), reduction="none")
        return losses.view(labels.shape).clone()  # FSDP2 warns of a view

    model.compute_language_model_loss = loss


def logits_narrow(engine: Any) -> None:
    layer = gpt(engine).output_layer
    del layer._forward_impl
    layer._forward_impl = type(layer)._forward_impl.__get__(layer) if hasattr(type(layer), "_forward_impl") else None
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce as plain

    layer._forward_impl = plain


def angles_in_bf16(engine: Any) -> None:
    rotary = gpt(engine).rotary_pos_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16()


def angles_rounded(engine: Any) -> None:
    rotary = gpt(engine).rotary_pos_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()


def weights_rounded_in_forward(engine: Any) -> None:
    module = linear(engine)
    real = module._forward_impl
    module._forward_impl = lambda input, weight, *args, **kwargs: real(
        input, weight.bfloat16().float(), *args, **kwargs
    )


def another_layers_weight(engine: Any) -> None:
    module, other = linear(engine, layer=1), linear(engine, layer=0)
    real = module._forward_impl
    module._forward_impl = lambda input, weight, *args, **kwargs: real(input, other.weight, *args, **kwargs)


def activations_rounded(engine: Any) -> None:
    module = linear(engine, "mlp.linear_fc2")
    module.register_forward_pre_hook(lambda module, args: (args[0].bfloat16().to(args[0].dtype), *args[1:]))


def autocast_on(engine: Any) -> None:
    real = engine.train_step

    def step(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return real(*args, **kwargs)

    engine.train_step = step


# --- quantization --------------------------------------------------------------------------------------------------------------------------
def paused(engine: Any) -> None:
    engine.emulation.is_paused = True


def unplugged(engine: Any) -> None:
    linear(engine).plug = None


def all_unplugged(engine: Any) -> None:
    for module in engine.emulation.plugged():
        module.plug = None


def forward_swapped(engine: Any) -> None:
    module = linear(engine)
    module._forward_impl = lambda input, weight, *args, **kwargs: torch.nn.functional.linear(input, weight)


def class_swapped(engine: Any) -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    linear(engine).__class__ = ColumnParallelLinear


def operand(role: str, side: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Replaces one operand of every quantized linear on its way to the GEMM."""

    def plant(engine: Any) -> None:
        for quantizer in engine.emulation.quantizers.values():
            real = quantizer.operand

            def make(x: Any, *, gemm: Any, side: Any, real: Any = real, wanted: Any = (role, side), **more: Any) -> Any:
                made = real(x, gemm=gemm, side=side, **more)
                return change(x) if (gemm, side) == wanted else made

            quantizer.operand = make
            if hasattr(quantizer, "shares_copies"):
                quantizer.shares_copies = lambda side: False

    return plant


def unquantized(x: torch.Tensor) -> Any:
    from mpbridge.emulation.quantizer import Operand

    return Operand(x.bfloat16(), None)


def wrong_format(number: str, *, gradient: bool) -> Callable[[Any], None]:
    def plant(engine: Any) -> None:
        from mpbridge.formats import FORMATS

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
    import mpbridge.emulation.nvfp4 as module

    engine.undo.append(SimpleNamespace(owner=module, name="rotate", value=module.rotate))
    module.rotate = lambda x, **options: x


def rounded_to_nearest(engine: Any) -> None:
    import mpbridge.emulation.nvfp4 as module

    engine.undo.append(SimpleNamespace(owner=module, name="values_stochastic", value=module.values_stochastic))
    from mpbridge.formats import E2M1

    def nearest(view: Any, multiplier: Any, factor: Any, random: Any, out: Any) -> Any:
        return module.values(view, multiplier, factor, E2M1, out)

    module.values_stochastic = nearest


ROUND = change_gradients(lambda grad: grad.bfloat16().float())
CATALOGUE = (
    Fault("model never refreshed", model_never_refreshed, (*CORE, "fp16", "moe", "mfsdp"), ("weights as read",), quick=True),
    Fault("one weight never refreshed", one_weight_never_refreshed, CORE, ("weights as read",), "linear_fc1.weight"),
    Fault("forward weight disturbed", weight_disturbed, CORE, ("weights as read",), "linear_fc1.weight"),
    Fault("optimizer frozen", optimizer_frozen, (*ALL, "fsdp2 a", "aware"), ("weights moved",), quick=True),
    Fault("one weight frozen", one_weight_frozen, ALL, ("weights moved",)),
    Fault("dropped from the optimizer", dropped_from_the_optimizer, ALL, ("optimizer holds", "invariants"), quick=True),
    Fault("a group's rate is 0", rate_of_a_group_zero, CORE, ("weights moved",)),
    Fault("requires_grad off", requires_grad_off, ("ddp", "fsdp2"), ("optimizer holds",), "linear_fc1.weight", quick=True),
    Fault("moment in BF16", cast_state("exp_avg", torch.bfloat16), (*ALL, "fsdp2 a"), ("exp_avg", "invariants")),
    Fault("second moment in FP16", cast_state("exp_avg_sq", torch.float16), ("ddp", "fsdp2"), ("exp_avg_sq", "invariants")),
    Fault("first moment rounded", round_state("exp_avg"), ("ddp", "fsdp2", "aware"), ("bits of states",), quick=True),
    Fault("second moment rounded", round_state("exp_avg_sq"), ("dist", "mfsdp"), ("bits of states",)),
    Fault("main weights rounded", main_weights_rounded, CORE, ("bits of states",), quick=True),
    Fault("remainders zeroed", remainders_zeroed, ("aware", "fsdp2 a"), ("bits of states", "weights moved"), quick=True),
    Fault("a second master copy", second_copy, ("ddp", "fsdp2", "mfsdp"), ("main_params", "invariants")),
    Fault("norm's weight in FP32", norm_in_fp32, ("ddp",), ("params", "invariants"), "layernorm"),
    Fault("gradient doubled", change_gradients(lambda grad: grad * 2), (*CORE, "mfsdp"), ("gradients",), "linear_fc1.weight", quick=True),
    Fault("gradient lost", change_gradients(torch.zeros_like), CORE, ("gradients", "weights moved"), "linear_fc1.weight"),
    Fault("gradient rounded to BF16", ROUND, (*CORE, "mfsdp", "fp32"), ("gradients",), "linear_fc1.weight", quick=True),
    Fault("gradient's sign turned", change_gradients(torch.neg), ("ddp",), ("gradients",), "linear_fc1.weight"),
    Fault("gradient transposed within", change_gradients(lambda grad: grad.flip(0)), ("ddp",), ("gradients",), "linear_fc1.weight"),
    Fault("only the last micro-batch counts", last_microbatch_only, CORE, ("gradients",), quick=True),
    Fault("loss not scaled", loss_unscaled, ("fp16",), ("loss scale", "gradients"), quick=True),
    Fault("nothing scales the loss", no_scale_function, ("fp16",), ("derived flags", "loss scale")),
    Fault("gradients unscaled twice", unscaled_twice, ("fp16",), ("gradients",), quick=True),
    Fault("scale of 1", scale_of_one, ("fp16",), ("loss scale", "loss scale adapts"), quick=True),
    Fault("scaler's window", scaler_window, ("fp16",), ("derived flags", "invariants")),
    Fault("scale drifts", scale_drifts, ("fp16",), ("loss scale adapts",)),
    Fault("bf16 flag off", flip("model", "bf16", False), ("ddp",), ("derived flags", "invariants")),
    Fault("params_dtype", flip("model", "params_dtype", torch.float32), ("ddp", "fsdp2 a"), ("derived flags", "invariants")),
    Fault("reduction flag", flip("ddp", "grad_reduce_in_fp32", False), CORE, ("derived flags", "invariants")),
    Fault("softmax flag", flip("model", "attention_softmax_in_fp32", False), ("ddp", "fsdp2"), ("derived flags", "invariants"), quick=True),
    Fault("residual flag", flip("model", "fp32_residual_connection", True), ("ddp",), ("derived flags", "invariants")),
    Fault("optimizer's bf16 flag", flip("optimizer", "bf16", False), ("ddp",), ("derived flags", "invariants")),
    Fault("autocast flag", flip("model", "enable_autocast", True), ("ddp",), ("derived flags", "invariants")),
    Fault("FP8 flag", flip("model", "fp8", "hybrid"), ("ddp",), ("derived flags", "invariants")),
    Fault("linear in FP32", linear_in(torch.float32), ("ddp", "fsdp2", "mfsdp"), ("compute",), "linear_fc1", quick=True),
    Fault("linear in FP16", linear_in(torch.float16), ("ddp",), ("compute",), "linear_fc1"),
    Fault("attention in FP16", attention_in(torch.float16), ("ddp", "fsdp2"), ("attention",), "core_attention", quick=True),
    Fault("attention in FP32", attention_in(torch.float32), ("ddp",), ("attention",), "core_attention"),
    Fault("router in BF16", router_in_bf16, ("moe",), ("router", "derived flags"), quick=True),
    Fault("residual stream rounded", stream_rounded, ("residual", "fp32"), ("residual stream",), quick=True),
    Fault("residual stream rounded before a norm", stream_rounded_before_norm, ("fp32",), ("residual stream",)),
    Fault("cross entropy in BF16", loss_in_bf16, ("ddp", "fsdp2"), ("loss",), quick=True),
    Fault("logits narrow", logits_narrow, ("logits",), ("logits",), "output_layer", quick=True),
    Fault("rotary angles in BF16", angles_in_bf16, ("ddp", "fp32"), ("rotary angles",), "inv_freq", quick=True),
    Fault("rotary angles rounded", angles_rounded, ("ddp",), ("rotary angles",), "inv_freq"),
    Fault("weights rounded in forward", weights_rounded_in_forward, ("fp32",), ("compute",), "linear_fc1", quick=True),
    Fault("another layer's weight", another_layers_weight, ("ddp",), ("compute", "gradients", "weights moved"), "linear_fc1"),
    Fault("activations rounded", activations_rounded, ("fp32",), ("residual stream",), "linear_fc2"),
    Fault("autocast on", autocast_on, ("ddp", "fp32"), ("autocast",), quick=True),
    Fault("emulation paused", paused, ("tensorwise", "tensorwise fsdp2", "nvfp4"), ("quantized GEMMs",), quick=True),
    Fault("linear unplugged", unplugged, ("tensorwise", "tensorwise fsdp2", "mxfp8"), ("linears", "invariants"), "linear_fc1"),
    Fault("all linears unplugged", all_unplugged, ("tensorwise", "delayed"), ("linears", "invariants"), quick=True),
    Fault("linear's forward swapped", forward_swapped, ("tensorwise", "mxfp8"), ("quantized GEMMs",), "linear_fc1", quick=True),
    Fault("linear's class swapped", class_swapped, ("tensorwise",), ("quantized GEMMs", "linears"), "linear_fc1"),
    Fault("E4M3 for E5M2 gradients", wrong_format("e4m3", gradient=True), ("tensorwise", "delayed"), ("quantized GEMMs",), "dy", quick=True),
    Fault("E5M2 for E4M3 forward", wrong_format("e5m2", gradient=False), ("tensorwise", "mxfp8"), ("quantized GEMMs",), "fprop"),
    Fault("wgrad's gradient unquantized", operand("wgrad", "dy", unquantized), ("tensorwise", "mxfp8", "nvfp4"), ("quantized GEMMs",), "wgrad dy", quick=True),
    Fault("wgrad's input unquantized", operand("wgrad", "x", unquantized), ("mxfp8", "nvfp4"), ("quantized GEMMs",), "wgrad x"),
    Fault("dgrad's gradient unquantized", operand("dgrad", "dy", unquantized), ("mxfp8",), ("quantized GEMMs",), "dgrad dy"),
    Fault("dgrad's weight unquantized", operand("dgrad", "w", unquantized), ("mxfp8",), ("quantized GEMMs",), "dgrad w"),
    Fault("fprop's weight unquantized", operand("fprop", "w", unquantized), ("tensorwise", "nvfp4"), ("quantized GEMMs",), "fprop w"),
    Fault("fprop's input unquantized", operand("fprop", "x", unquantized), ("tensorwise", "mxfp8"), ("quantized GEMMs",), "fprop x"),
    Fault("delayed scales frozen", scales_frozen, ("delayed",), ("delayed scales",), quick=True),
    Fault("margin", detail(margin=2), ("delayed",), ("delayed scales",)),
    Fault("amax algorithm", detail(amax_algo="most_recent"), ("delayed",), ("delayed scales", "linears"), early=False),
    Fault("history cut short", history_cut, ("delayed",), ("delayed scales",)),
    Fault("no Hadamard transform", not_rotated, ("nvfp4",), ("quantized GEMMs",), "Hadamard", quick=True),
    Fault("rounded to nearest", rounded_to_nearest, ("nvfp4",), ("quantized GEMMs",), "stochastic", quick=True),
)  # fmt: skip
