"""Faults of runs whose parameters have roles of their own: Muon's matrices, adapters beside a frozen base, Mamba layers; each with the row that has to name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mpbridge.common.probe import installed
from mpbridge.common.versions import at_least
from tests.observe.audit import compute_faults as c
from tests.observe.audit import faults as f
from tests.observe.audit import hostile_faults as h
from tests.observe.audit import hybrid_faults as m
from tests.observe.audit import step_faults as s
from tests.observe.audit.catalogue import HYBRID, PLAIN, Fault

MUON = {"optimizer": "muon", "lr": 1e-2, "weight_decay": 0.1}
LORA = {"lora_rank": 4, "lora_alpha": 8.0, "share_embeddings_and_output_weights": False}
BASE = {"recipe": "bf16_mixed", "frozen": ["*"]}
FP8_BASE = {"recipe": "bf16_with_fp8_current_scaling_mixed", "frozen": ["*"], **PLAIN}
WIDE = {"lora_dtype": "fp32"}
ON_MIXERS = {"lora_targets": ["mixer.in_proj", "mixer.out_proj", "mlp.*"]}
SHARDED = {"use_distributed_optimizer": True}
TE = {"emulate": "te", "target": "b200"}
NESTEROV = "muon_nesterov" if at_least(installed().megatron_core, "0.18") else "muon_use_nesterov"
ENGINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "muon": ("fp32", {"engine": "fsdp2", "optimizer": MUON}),
    "muon bf16": ("fp32_params_bf16_compute", {"engine": "fsdp2", "optimizer": MUON | {NESTEROV: True}}),
    "core muon": ("bf16", {"optimizer": MUON}),
    "core muon fp32": ("fp32", {"optimizer": MUON | {"muon_fp32_matmul_prec": "highest", NESTEROV: True}}),
    "lora": (BASE, {"model": LORA}),
    "lora wide": (BASE | WIDE, {"model": LORA, "ddp": SHARDED}),
    "lora hybrid": (BASE | WIDE, {"model": HYBRID | LORA | ON_MIXERS}),
    "lora tensorwise": (FP8_BASE, {"emulate": True, "model": LORA}),
    "lora mxfp8": (BASE | {"recipe": "bf16_with_mxfp8_mixed"} | WIDE, {"emulate": True, "model": LORA}),
    "lora nvfp4": (BASE | {"recipe": "bf16_with_nvfp4_mixed"}, {"emulate": True, "model": LORA}),
    "hybrid": ("bf16", {"model": HYBRID}),
    "hybrid sharded": ("bf16", {"model": HYBRID, "ddp": SHARDED}),
    "hybrid mxfp8": ({"recipe": "bf16_with_mxfp8_mixed"}, {"emulate": True, "model": HYBRID}),
    "hybrid nvfp4": ({"recipe": "bf16_with_nvfp4_mixed"}, {"emulate": True, "model": HYBRID | {"mamba_state_dim": 28}}),
    "lora stored": (FP8_BASE | {"fp8_param": True}, TE | {"model": LORA, "ddp": SHARDED}),
    "lora stored mxfp8": (BASE | {"recipe": "bf16_with_mxfp8_mixed", "fp8_param": True}, TE | {"model": LORA, "ddp": SHARDED | {"overlap_grad_reduce": True, "overlap_param_gather": True}}),
    "lora stored nvfp4": (BASE | {"recipe": "bf16_with_nvfp4_mixed", "fp4_param": True}, TE | {"model": LORA, "ddp": SHARDED}),
}  # fmt: skip
TORCHS, CORES = ("muon", "muon bf16"), ("core muon", "core muon fp32")
MUONS = (*TORCHS, *CORES)
ADAPTERS = ("lora", "lora wide", "lora hybrid")
NEEDS = {"core muon": "emerging_optimizers", "core muon fp32": "emerging_optimizers"}
"""Engine -> the package without which it is not built."""


# --- Muon ----------------------------------------------------------------------------------------------------------------------------------
def inner_of(engine: Any) -> list[Any]:
    from mpbridge.observe.audit.flags import inner_optimizers

    return inner_optimizers(engine.optimizer)


def muon(engine: Any) -> Any:
    return next(one for one in inner_of(engine) if "Muon" in type(one).__name__)


def momenta(engine: Any) -> list[torch.Tensor]:
    return [state["momentum_buffer"] for state in muon(engine).state.values() if state]


@f.given
def of_momenta(engine: Any, change: Callable[[torch.Tensor], None]) -> None:
    """Once, now."""
    for momentum in momenta(engine):
        change(momentum)


def momentum_zeroed_before_every_step(engine: Any) -> None:
    f.around(muon(engine), "step", lambda: [momentum.zero_() for momentum in momenta(engine)] and None)


def momentum_cast(engine: Any) -> None:
    for state in muon(engine).state.values():
        if state:
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16()


def momentum_rounded_after_every_step(engine: Any) -> None:
    f.after(muon(engine), "step", lambda: [one.copy_(one.bfloat16()) for one in momenta(engine)] and None)


@f.given
def of_muon(engine: Any, **values: Any) -> None:
    """Settings of its groups, or beside them, that its config does not declare."""
    own = muon(engine)
    core = {"momentum": "momentum_beta"} if hasattr(own, "scaled_orthogonalize_fn") else {}
    for name, value in values.items():
        if core and name in ("nesterov", "fp32_matmul_prec"):
            setattr(own, {"nesterov": "use_nesterov"}.get(name, name), value)
        for group in own.param_groups:
            group |= {core.get(name, name): value} if core.get(name, name) in group else {}


@f.given
def orthogonalized_by(engine: Any, made: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """What is taken for the orthogonalized matrix: `made` of (the real function, the momentum)."""
    own = muon(engine)
    if hasattr(own, "scaled_orthogonalize_fn"):
        f.instead(own, "scaled_orthogonalize_fn", lambda real, grad, *rest: made(lambda one: real(one, *rest), grad))
        return

    def moved(real: Any, name: str, direction: torch.Tensor, group: Any) -> torch.Tensor:
        return -group["lr"] * made(lambda one: real(name, one, group) / -group["lr"], direction)

    f.instead(own, "_moved", moved)


def _as_it_is(real: Any, momentum: torch.Tensor) -> torch.Tensor:
    return momentum / momentum.norm() * real(momentum).norm()


_to = torch.Tensor.to


def _but_for_iterations(one: torch.Tensor, *words: Any, **named: Any) -> torch.Tensor:
    """Tensor.to, without the cast that torch's iteration begins with."""
    return _to(one, *words, **(named if named != {"dtype": torch.bfloat16, "copy": True} else {"dtype": torch.float32}))


CASTS = {"bfloat16": lambda one: one.float().clone(), "to": _but_for_iterations}
"""Methods of a tensor that leave torch's Newton-Schulz in FP32: it casts with the first, from torch 2.15 on with the second."""


def in_another_format(engine: Any) -> None:
    """The iteration of an FP32 run in BF16, that of a BF16 run in FP32."""
    own = muon(engine)
    if hasattr(own, "fp32_matmul_prec"):
        own.fp32_matmul_prec = "highest" if own.fp32_matmul_prec == "medium" else "medium"
        return

    def wide(step: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, cast in CASTS.items():
                patch.setattr(torch.Tensor, name, cast)
            step()

    f.instead(own, "step", wide)


def given_to_adam(engine: Any) -> None:
    from mpbridge.observe.audit.holdings import holdings

    own, name = muon(engine), "decoder.layers.0.mlp.linear_fc1.weight"
    mine = next(held.updated for held in holdings(engine) if held.name == name)
    adam = next(one for one in inner_of(engine) if one is not own)
    for group in own.param_groups:
        group["params"] = [one for one in group["params"] if one is not mine]
    if hasattr(own, "whole"):
        own.whole = {key: one for key, one in own.whole.items() if key != name}
    adam.param_groups[0]["params"].append(mine)


def adams_moments_zeroed(engine: Any) -> None:
    for one in inner_of(engine):
        for state in one.state.values():
            if "exp_avg" in state:
                state["exp_avg"].zero_()


# --- adapters ------------------------------------------------------------------------------------------------------------------------------
def adapters(engine: Any) -> list[Any]:
    return [one for one in f.gpt(engine).modules() if type(one).__name__ == "Adapter"]


def named(engine: Any, end: str) -> Any:
    return next(one for name, one in engine.named_parameters() if name.endswith(end))


@f.given
def scale_times(engine: Any, factor: float) -> None:
    for one in adapters(engine):
        one.scale *= factor


@f.given
def result_times(engine: Any, factor: float) -> None:
    """One adapter's result, with its scale untouched."""
    f.changed(adapters(engine)[-1], "forward", lambda out: out * factor)


def cast(engine: Any) -> None:
    for one in adapters(engine):
        for parameter in one.parameters():
            parameter.data = parameter.data.bfloat16()


def computed_in_bf16(engine: Any) -> None:
    """FP32 adapters multiply BF16 copies of their weights."""
    for one in adapters(engine):
        for linear in (one.linear_in, one.linear_out):
            linear.forward = lambda x, own=linear: torch.nn.functional.linear(
                x.bfloat16(), own.weight.bfloat16()
            ).float()


def reads_e4m3(engine: Any) -> None:
    """An adapter reads its input through E4M3."""
    f.instead(adapters(engine)[-1], "forward", lambda real, x: real(x.to(torch.float8_e4m3fn).to(x.dtype)))


END = "mlp.linear_fc1.weight"


def base_moves(engine: Any) -> None:
    f.after(engine, "train_step", lambda: named(engine, END).data.view(-1)[5:6].add_(1.0))


def stored_base_moves(engine: Any) -> None:
    """One code of a stored FP8 weight changes."""
    codes = named(engine, END)
    data = codes._data if hasattr(codes, "_data") else codes._rowwise_data
    data.view(-1)[5:6].bitwise_xor_(1)


def stored_columns_move(engine: Any) -> None:
    """Codes of the copy by columns, which the input's gradient is computed from, change their signs."""
    named(engine, END)._columnwise_data.view(-1)[:4096].bitwise_xor_(128)


@f.given
def stored_factor_moves(engine: Any, copy: str) -> None:
    """The second factor of an NVFP4 copy's scales, so that each of its values is four times what it was."""
    getattr(named(engine, END), f"_amax_{copy}").mul_(4)


def base_rescaled(engine: Any) -> None:
    """The codes of a stored weight stay, its scale does not."""
    codes = named(engine, END)
    scale = codes._scale_inv if hasattr(codes, "_scale_inv") else codes._rowwise_scale_inv

    def change() -> None:
        scale.view(-1)[:1] += 1 if scale.dtype is torch.uint8 else 0.5 * scale.view(-1)[:1]

    f.after(engine, "train_step", change)


def base_trains(engine: Any) -> None:
    named(engine, END).requires_grad_(True)


def base_has_a_gradient(engine: Any) -> None:
    named(engine, END).main_grad = torch.zeros(3)


def adapter_stops(engine: Any) -> None:
    named(engine, "linear_fc1.adapter.linear_out.weight").requires_grad_(False)


def adapters_zeroed(engine: Any) -> None:
    """One factor is what it was at first again, after each step."""
    f.after(engine, "train_step", lambda: named(engine, "linear_fc1.adapter.linear_out.weight").data.zero_())


def another_linears_adapter(engine: Any) -> None:
    """Two adapters of one shape are swapped in forward."""
    alike: dict[torch.Size, list[Any]] = {}
    for each in adapters(engine):
        alike.setdefault(each.linear_in.weight.shape, []).append(each)
    one, *_, other = next(found for found in alike.values() if len(found) > 1)
    real = other.linear_in
    one.linear_in.forward = real.forward


def reads_another_input(engine: Any) -> None:
    """An adapter reads its linear's input, moved by one token."""
    f.instead(adapters(engine)[-1], "forward", lambda real, x: real(x.roll(1, 0)))


def is_given_another_input(engine: Any) -> None:
    """What calls an adapter hands it a copy of twice its linear's input."""
    adapters(engine)[-1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))


@f.given
def base_times(engine: Any, factor: float) -> None:
    """A linear's result, or its weight, times a factor within forward; the adapter's is added to it afterwards."""
    one = next(one for name, one in f.gpt(engine).named_modules() if name.endswith("mlp.linear_fc1"))
    f.changed(one, "forward", lambda made: (made[0] * factor, made[1]))


def without_decay_within_a_step(engine: Any) -> None:
    """Muon's step leaves weight decay out, and its groups say otherwise before and after it."""
    own = muon(engine)

    def plain(step: Any) -> Any:
        kept = [group["weight_decay"] for group in own.param_groups]
        for group in own.param_groups:
            group["weight_decay"] = 0.0
        try:
            return step()
        finally:
            for group, decay in zip(own.param_groups, kept, strict=True):
                group["weight_decay"] = decay

    f.instead(own, "step", plain)


# --- hybrids -------------------------------------------------------------------------------------------------------------------------------
def scaled_skip(engine: Any) -> None:
    """D reaches the scan rounded to E4M3."""

    def scan(real: Any, projection: Any, weight: Any, bias: Any, dt_bias: Any, A: Any, D: Any, **named: Any) -> Any:
        return real(projection, weight, bias, dt_bias, A, D.to(torch.float8_e4m3fn).to(D.dtype), **named)

    m._scan_by(engine, scan)


def in_fp16(engine: Any) -> None:
    """The scan's inputs pass through FP16."""

    def scan(real: Any, projection: Any, *given: Any, **named: Any) -> Any:
        return real(projection.half().to(projection.dtype), *given, **named)

    m._scan_by(engine, scan)


def kept_step_sizes_cast(engine: Any) -> None:
    m.cast("dt_bias", torch.float16)(engine)


STEP = ("optimizer step",)
NS = ("newton-schulz",)
STATES = ("exp_avg", "invariants", "optimizer step", "bits of states")
FAULTS = (
    Fault("Newton-Schulz in another format", in_another_format, MUONS, NS, quick=True),
    Fault("the momentum as it is", orthogonalized_by(_as_it_is), MUONS, NS),
    Fault("update of a fifth of its size", orthogonalized_by(lambda real, one: real(one) / 5), MUONS, NS),
    Fault("two iterations of five", of_muon(ns_steps=2), TORCHS, (*NS, *STEP)),
    Fault("a matrix given to Adam", given_to_adam, TORCHS, ("trained by",), "linear_fc1", quick=True),
    Fault("a matrix given to megatron-core's Adam", given_to_adam, CORES, ("trained by", "optimizer holds", "exp_avg", "invariants"), "linear_fc1"),
    Fault("momentum zeroed before a step", of_momenta(torch.Tensor.zero_), MUONS, STEP, "changed between two steps", early=False, once=True, quick=True),
    Fault("momentum zeroed before every step", momentum_zeroed_before_every_step, MUONS, STEP, "does not follow", early=False),
    Fault("half of the momentum", of_momenta(lambda one: one.view(-1)[::2].mul_(0.5)), MUONS, STEP, "between two steps", early=False, once=True),
    Fault("momentum in BF16", momentum_cast, TORCHS, STATES, early=False, fatal=True),
    Fault("momentum rounded to BF16", momentum_rounded_after_every_step, MUONS, ("bits of states", *STEP)),
    Fault("momentum of 0.5", of_muon(momentum=0.5), MUONS, STEP, "momentum 0.5, declared 0.95", quick=True),
    Fault("Nesterov's momentum", of_muon(nesterov=True), ("muon", "core muon"), STEP, "Nesterov true, declared false"),
    Fault("no Nesterov's momentum", of_muon(nesterov=False), ("muon bf16", "core muon fp32"), STEP, "Nesterov false, declared true"),
    Fault("products in another precision than declared", of_muon(fp32_matmul_prec="high"), CORES, (*STEP, *NS), "products high"),
    Fault("Muon without weight decay", of_muon(weight_decay=0.0), MUONS, STEP, "weight decay 0, declared 0.1"),
    Fault("Muon's step leaves weight decay out", without_decay_within_a_step, MUONS, NS, "weight decay", quick=True),
    Fault("the other parameters' moments zeroed", adams_moments_zeroed, MUONS, STEP, "exp_avg changed", early=False, once=True),
    Fault("a matrix's gradient doubled", f.change_gradients(lambda grad: grad * 2), CORES, ("gradients",), "linear_fc1"),
    Fault("a matrix never refreshed", f.one_weight_never_refreshed, ("core muon",), ("weights as read",), "linear_fc1"),
    Fault("adapters' scale halved", scale_times(0.5), (*ADAPTERS, "lora tensorwise", "lora nvfp4"), ("adapters",), "adapter", early=False, quick=True),
    Fault("an adapter's result doubled", result_times(2.0), ADAPTERS, ("adapters",), "adapter", early=False),
    Fault("an adapter's result lost", result_times(0.0), ADAPTERS, ("adapters",), "adapter", early=False),
    Fault("FP32 adapters stored in BF16", cast, ("lora wide",), ("params", "invariants"), "adapter", quick=True),
    Fault("FP32 adapters stored in BF16 beside emulated linears", cast, ("lora hybrid", "lora mxfp8"), (), "", fatal=True),
    Fault("FP32 adapters multiply in BF16", computed_in_bf16, ("lora wide", "lora hybrid", "lora mxfp8"), ("compute",), "adapter"),
    Fault("an adapter reads E4M3", reads_e4m3, ADAPTERS, ("compute",), "adapter"),
    Fault("an adapter with another's factor", another_linears_adapter, ADAPTERS, ("compute",), "linear_in", quick=True),
    Fault("an adapter reads another token's input", reads_another_input, ADAPTERS, ("compute",), "adapter", quick=True),
    Fault("an adapter is given another input", is_given_another_input, ADAPTERS, ("compute",), "adapter"),
    Fault("a base times 1.25 in forward", base_times(1.25), ADAPTERS, ("compute",), "linear_fc1", quick=True),
    Fault("an adapter that stops", adapter_stops, ADAPTERS, ("frozen", "optimizer holds"), "linear_out", quick=True),
    Fault("an adapter made anew after each step", adapters_zeroed, ("lora", "lora wide", "lora tensorwise"), ("weights as read", *STEP), "adapter", behind=1),
    Fault("adapters never refreshed", f.model_never_refreshed, ("lora", "lora tensorwise", "lora nvfp4"), ("weights as read",), "adapter"),
    Fault("adapters' moments zeroed before every step", s.moments_zeroed_before_every_step, ADAPTERS, STEP, "adapter", early=False),
    Fault("a base that moves", base_moves, (*ADAPTERS, "lora tensorwise", "lora mxfp8", "lora nvfp4"), ("frozen",), "changed", behind=1, early=False, quick=True),
    Fault("a base that trains", base_trains, ADAPTERS, ("frozen",), "trains", quick=True),
    Fault("a base with a gradient", base_has_a_gradient, ("lora", "lora tensorwise"), ("frozen",), "has a gradient"),
    Fault("a base whose input is not quantized", h.operands_of("fprop", "x", c.unquantized), ("lora tensorwise", "lora mxfp8", "lora nvfp4"), ("quantized GEMMs",), "fprop x"),
    Fault("a base without its context", c.paused, ("lora tensorwise", "lora mxfp8", "lora nvfp4"), ("quantized GEMMs",)),
    Fault("a base's quantized copy is another weight's", h.operands_of("fprop", "w", h.coarse), ("lora tensorwise",), ("quantized GEMMs",), "fprop w"),
    Fault("NVFP4 without its context", c.paused, ("hybrid nvfp4",), ("quantized GEMMs",), "mixer", quick=True),
    Fault("MXFP8 without its context", c.paused, ("hybrid mxfp8",), ("quantized GEMMs",), "mixer"),
    Fault("scan in BF16 under low precision", m.scan_in_bf16, ("hybrid mxfp8", "hybrid nvfp4", "hybrid sharded"), ("scan",), "mixer"),
    Fault("mixer's projection rounded twice", h.operands_of("fprop", "x", h.coarse), ("hybrid mxfp8",), ("quantized GEMMs",), "fprop x"),
    Fault("the scan's inputs through FP16", in_fp16, ("hybrid", "hybrid mxfp8"), ("compute",), "fp16 in"),
    Fault("step sizes stored in FP16", kept_step_sizes_cast, ("hybrid", "hybrid sharded"), ("params", "invariants"), "dt_bias"),
    Fault("Mamba's moments zeroed before every step", s.moments_zeroed_before_every_step, ("hybrid", "hybrid sharded"), STEP, "mixer", early=False),
    Fault("a hybrid never refreshed", f.model_never_refreshed, ("hybrid", "hybrid sharded"), ("weights as read",), "mixer"),
    Fault("a code of a stored base moves", stored_base_moves, ("lora stored", "lora stored mxfp8"), ("frozen",), "changed", early=False),
    Fault("a stored base's codes by columns move", stored_columns_move, ("lora stored mxfp8",), ("frozen",), "by columns (changed)", early=False),
    Fault("a stored base's second factor moves", stored_factor_moves("rowwise"), ("lora stored nvfp4",), ("frozen",), "linear_fc1.weight (changed)", early=False),
    Fault("a stored base's second factor by columns moves", stored_factor_moves("columnwise"), ("lora stored nvfp4",), ("frozen",), "by columns (changed)", early=False),
    Fault("a stored base's scale moves", base_rescaled, ("lora stored mxfp8", "lora stored"), ("frozen",), "changed", behind=1, early=False),
    Fault("a stored base's adapters halved", scale_times(0.5), ("lora stored", "lora stored mxfp8"), ("adapters",), "adapter", early=False),
)  # fmt: skip
