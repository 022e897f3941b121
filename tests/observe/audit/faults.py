"""Faults to plant in a healthy engine: in weights, states, gradients, the loss scale and flags; those of what a step computes stand in compute_faults."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch


# --- ways in -------------------------------------------------------------------------------------------------------------------------------
def gpt(engine: Any) -> Any:
    model = engine.model[0]
    while hasattr(model, "module"):
        model = model.module
    return model


def linear(engine: Any, path: str = "mlp.linear_fc1", layer: int = 1) -> Any:
    return gpt(engine).decoder.layers[layer].get_submodule(path)


def inner(engine: Any) -> Any:
    from mpbridge.observe.audit.flags import inner_optimizers

    return inner_optimizers(engine.optimizer)[0]


def parts(engine: Any) -> list[Any]:
    return list(engine.optimizer.chained_optimizers)


def given(plant: Callable[..., None]) -> Callable[..., Callable[[Any], None]]:
    """A fault with settings: plant(engine, *settings) becomes plant(*settings), which is planted in an engine."""

    @wraps(plant)
    def with_settings(*args: Any, **named: Any) -> Callable[[Any], None]:
        return lambda engine: plant(engine, *args, **named)

    return with_settings


def instead(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """`call`, which gets the real one ahead of its arguments, in place of `owner.name`."""
    setattr(owner, name, partial(call, getattr(owner, name)))


def changed(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """What `owner.name` returns is changed."""
    instead(owner, name, lambda real, *args, **kwargs: change(real(*args, **kwargs)))


def around(owner: Any, name: str, enters: Callable[[], Callable[[], None] | None]) -> None:
    """`enters` before each call of `owner.name`, and what it returns after it."""

    def call(real: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = enters()
        result = real(*args, **kwargs)
        if leaves is not None:
            leaves()
        return result

    instead(owner, name, call)


def after(owner: Any, name: str, then: Callable[[], None]) -> None:
    around(owner, name, lambda: then)


def narrow(value: Any) -> Any:
    """Tensors rounded to BF16, in their own dtype."""
    if isinstance(value, tuple):
        return tuple(map(narrow, value))
    return value.bfloat16().to(value.dtype) if isinstance(value, torch.Tensor) else value


def updated(engine: Any) -> list[torch.Tensor]:
    """What the inner optimizer updates on this rank."""
    return [getattr(p, "_local_tensor", p) for group in inner(engine).param_groups for p in group["params"]]


def largest(engine: Any) -> torch.Tensor:
    """The largest of them: its update is never below rounding."""
    return max(updated(engine), key=lambda p: p.numel())


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
    after(engine, "train_step", lambda: linear(engine).weight.data.view(-1)[5:6].add_(0.125))


def optimizer_frozen(engine: Any) -> None:
    if hasattr(engine.optimizer, "step_with_ready_grads"):
        engine.optimizer.step_with_ready_grads = lambda: True
    for part in parts(engine):
        getattr(part, "optimizer", part).step = nothing


def kept(engine: Any, first: int | None = None) -> Callable[[], Callable[[], None]]:
    """Puts elements of the largest weight back after an update: all, or every `first`-th part's."""

    def enters() -> Callable[[], None]:
        flat = largest(engine).detach().view(-1)
        part = flat[: flat.numel() // (first or 1)]
        old = part.clone()
        return lambda: part.copy_(old)  # type: ignore[func-returns-value]

    return enters


def one_weight_frozen(engine: Any) -> None:
    around(inner(engine), "step", kept(engine))


def half_of_a_weight_frozen(engine: Any) -> None:
    around(inner(engine), "step", kept(engine, 2))


def dropped_from_the_optimizer(engine: Any) -> None:
    inner(engine).param_groups[0]["params"].pop()


def rate_of_a_group_zero(engine: Any) -> None:
    inner(engine).param_groups[-1]["lr"] = 0.0


def requires_grad_off(engine: Any) -> None:
    linear(engine).weight.requires_grad_(False)


@given
def cast_state(engine: Any, name: str, dtype: torch.dtype) -> None:
    def cast() -> None:
        for state in states(engine)[:1]:
            state[name] = state[name].to(dtype)

    after(engine, "train_step", cast)


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


def main_weights_cast(engine: Any) -> None:
    """What the optimizer updates becomes BF16 after its first update."""

    def cast() -> None:
        for p in updated(engine):
            p.data = p.data.bfloat16()

    after(engine, "train_step", cast)


def parameters_alias(engine: Any) -> None:
    one, two = (gpt(engine).decoder.layers[number].pre_mlp_layernorm.weight for number in (0, 1))
    two.data = one.data


@given
def stored_as(engine: Any, dtype: torch.dtype, *path: str) -> None:
    """The parameters of one module rest in another dtype."""
    for parameter in gpt(engine).get_submodule(".".join(path)).parameters():
        own = getattr(parameter, "_local_tensor", parameter)
        own.data = own.data.to(dtype)


# --- gradients -----------------------------------------------------------------------------------------------------------------------------
@given
def change_gradients(
    engine: Any, change: Callable[[torch.Tensor], torch.Tensor], name: str = "linear_fc1.weight"
) -> None:
    """Changes accumulated gradients right before the optimizer looks at them; all of them for an empty name."""

    def act() -> None:
        for full, p in engine.named_parameters():
            if full.endswith(name):
                grad = getattr(p, "main_grad", None)
                grad = p.grad if grad is None else grad
                grad = getattr(grad, "_local_tensor", grad)
                grad.copy_(change(grad))

    after(engine.configs.model, "finalize_model_grads_func", act)


def last_microbatch_only(engine: Any) -> None:
    model = engine.model[0]
    model.register_forward_pre_hook(lambda *_: model.zero_grad_buffer())


# --- loss scale ----------------------------------------------------------------------------------------------------------------------------
def loss_unscaled(engine: Any) -> None:
    engine.configs.model.grad_scale_func = lambda loss: loss


def no_scale_function(engine: Any) -> None:
    engine.configs.model.grad_scale_func = None


def unscaled_twice(engine: Any) -> None:
    for part in parts(engine):
        instead(part, "_unscale_main_grads_and_check_for_nan", lambda real: (real(), real())[1])


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
@given
def flip(engine: Any, target: str, field: str, value: Any) -> None:
    from mpbridge.observe.audit.flags import configs

    setattr(configs(engine)[target], field, value)
