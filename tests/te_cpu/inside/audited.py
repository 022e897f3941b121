"""Faults planted into runs over Transformer Engine, each named by the audit; and Transformer Engine's own refusals of what would go wrong."""

from contextlib import nullcontext

import pytest
import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch import Float8CurrentScalingQuantizer

from mpbridge import pretrain
from mpbridge.common.errors import AuditFailed
from mpbridge.observe.audit.library import is_rounded
from mpbridge.training.base import Hook
from tests.observe.audit import model_faults
from tests.observe.audit.test_faults import check
from tests.te_cpu.two_ranks import BLOCKWISE, DELAYED, MXFP8, NVFP4, OVERLAP, TENSORWISE, WHOLE
from tests.worlds import one_process

from .training import BLACKWELL, tiny

slow, on_hopper = pytest.mark.slow, pytest.mark.played("hopper")  # once is enough
on_blackwell = pytest.mark.played("blackwell")  # its recipes
UNSTORED = "mixed_precision.fp8_param_gather=false"


def found(recipe: str, *overrides: str, hooks: tuple[Hook, ...] = ()) -> str:
    """What the audits of a short run say of its faults."""
    with pytest.raises(AuditFailed) as caught:
        pretrain(tiny(recipe, "train.audit=stop", "audit.every=1", *overrides), hooks=list(hooks), quiet=True)
    return str(caught.value)


class Plant(Hook):
    """Does something to the engine as soon as it is built."""

    def __init__(self, built) -> None:
        self._built = built

    def built(self, training) -> None:
        self._built(training.engine)


def module_of(engine, name: str):
    """The one whose name ends so."""
    return next(module for path, module in engine.model[0].named_modules() if path.endswith(name))


class Before(Hook):
    """Does something to a module before each of its forward passes."""

    def __init__(self, name: str, change) -> None:
        self.name, self.change = name, change

    def built(self, training) -> None:
        module = module_of(training.engine, self.name)
        forward = module.forward

        def changed(*args, **kwargs):
            self.change(module)
            return forward(*args, **kwargs)

        module.forward = changed


@pytest.fixture
def contexts(monkeypatch):
    """Puts another context around layer 0 while it is built."""
    from megatron.core.transformer import transformer_block

    original = transformer_block.get_fp8_context

    def replace(chosen) -> None:
        def context(config, layer=-1, is_init=False):
            return chosen() if is_init and layer == 0 else original(config, layer, is_init)

        monkeypatch.setattr(transformer_block, "get_fp8_context", context)

    return replace


# --- weights at rest -----------------------------------------------------------------------------------------------------------------------
def test_a_layer_built_outside_of_the_fp8_context_is_named(contexts) -> None:
    contexts(nullcontext)
    said = found(*((MXFP8, *OVERLAP) if BLACKWELL else (DELAYED,)))
    assert "params" in said
    assert "decoder.layers.0." in said


@on_hopper
def test_one_weight_left_in_bf16_is_named(monkeypatch) -> None:
    from transformer_engine.pytorch.module import linear

    original, left = linear.Linear.reset_parameters, []

    def reset(module, *args, **kwargs):
        if not left:
            left.append(module)
            module.primary_weights_in_fp8 = False
        original(module, *args, **kwargs)

    monkeypatch.setattr(linear.Linear, "reset_parameters", reset)
    assert "decoder.layers.0.self_attention.linear_proj.weight" in found(TENSORWISE, WHOLE)


@pytest.mark.parametrize("recipe", [MXFP8] if BLACKWELL else [pytest.param(DELAYED, marks=slow), TENSORWISE])
def test_weights_at_rest_that_do_not_follow_their_main_weights_are_named(recipe, monkeypatch) -> None:
    """The update of the quantized weights is lost behind the first step."""
    import importlib

    core = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    original = core.DistributedOptimizer._copy_main_params_to_model_params
    calls = []

    def once(optimizer) -> None:
        calls.append(optimizer)
        if len(calls) == 1:
            original(optimizer)

    monkeypatch.setattr(core.DistributedOptimizer, "_copy_main_params_to_model_params", once)
    if recipe == MXFP8:
        monkeypatch.setattr(core.DistributedOptimizer, "_copy_main_params_to_param_buffer", lambda optimizer: None)
    said = found(recipe, *(OVERLAP if recipe == MXFP8 else (WHOLE,)), "optimizer.lr=1e-2")
    assert "weights as read" in said


@on_blackwell
def test_a_loop_that_forgets_to_fill_the_reused_gradient_buffer_is_named(monkeypatch) -> None:
    """Every weight is gathered out of zeros, and the loss is the logarithm of the vocabulary."""
    monkeypatch.setattr("mpbridge.backend.engines.mcore.gather_mxfp8", lambda optimizer: None)
    said = found(MXFP8, *OVERLAP)
    assert "quantized weights as read" in said


# --- recipes -------------------------------------------------------------------------------------------------------------------------------
def around_layer_0(recipe):
    """A hook that lets layer 0 run under a recipe object of its own."""
    import transformer_engine.pytorch as te

    def wrap(engine) -> None:
        layer = module_of(engine, "decoder.layers.0")
        forward = layer.forward

        def under_another(*args, **kwargs):
            with te.autocast(enabled=True, recipe=recipe):
                return forward(*args, **kwargs)

        layer.forward = under_another

    return Plant(built=wrap)


@on_hopper
@pytest.mark.parametrize("kind", ["another class", "another margin", "another history", "powers of two"])
def test_another_recipe_object_in_one_layer_is_named(kind) -> None:
    from transformer_engine.common import recipe as te

    if kind == "powers of two":
        other = te.Float8CurrentScaling()
        other.fp8_quant_fwd_inp = te.QParams(power_2_scale=True)
        said = found(TENSORWISE, WHOLE, UNSTORED, hooks=(around_layer_0(other),))
        assert "input e4m3 tensorwise with power_of_two" in said
    else:
        other = {
            "another class": te.Float8BlockScaling(),
            "another margin": te.DelayedScaling(margin=2, amax_history_len=1024, amax_compute_algo="max"),
            "another history": te.DelayedScaling(amax_history_len=16, amax_compute_algo="max"),
        }[kind]
        said = found(DELAYED, UNSTORED, hooks=(around_layer_0(other),))
    assert "linears" in said
    assert "decoder.layers.0." in said
    assert "decoder.layers.1." not in said


SET = [
    # recipe, kind of quantizers, what is set on them, what is said
    pytest.param(TENSORWISE, "scaling_bwd", {"dtype": "kFloat8E4M3"}, "grad_output e4m3", marks=on_hopper),
    *(pytest.param(name, "scaling_bwd", {"dtype": "kFloat8E4M3"}, "grad_output e4m3", marks=(slow, on_hopper)) for name in (DELAYED, BLOCKWISE)),
    pytest.param(MXFP8, "scaling_fwd", {"dtype": "kFloat8E5M2"}, "input e5m2 mxfp8, weight e5m2 mxfp8", marks=on_blackwell),
    pytest.param(NVFP4, "scaling_fwd", {"with_rht": False}, "(input e2m1 nvfp4)", marks=on_blackwell),
    pytest.param(NVFP4, "scaling_bwd", {"stochastic_rounding": False}, "(grad_output e2m1 nvfp4 with hadamard)", marks=on_blackwell),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "state", "changes", "said_of_it"), SET)
def test_quantizers_that_do_otherwise_than_the_recipe_object_are_named(recipe, state, changes, said_of_it) -> None:
    def other(linear) -> None:
        for quantizer in linear.quantizers.get(state, ()):
            for name, value in changes.items():
                setattr(quantizer, name, getattr(tex.DType, value) if name == "dtype" else value)

    low = [] if recipe == NVFP4 else [UNSTORED]
    low += ["mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=false"] * (recipe == MXFP8)
    said = found(recipe, WHOLE, *low, hooks=(Before("layers.1.mlp.linear_fc2", other),))
    assert said_of_it in said
    assert "decoder.layers.1.mlp.linear_fc2" in said


def by_role(role):
    """An author's factory: E5M2 for gradients. Its role is text under the oldest release."""
    kind = role if isinstance(role, str) else getattr(role, "tensor_type", "")
    return _current("kFloat8E5M2" if "grad" in kind else "kFloat8E4M3")


def forward_only(role):
    """An author's factory: dgrad and wgrad in high precision."""
    from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
    from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

    if getattr(role, "tensor_type", "") not in ("input", "weight"):
        return IdentityQuantizer()
    return HybridQuantizer(rowwise_quantizer=_current("kFloat8E4M3"), columnwise_quantizer=IdentityQuantizer())


def _current(dtype: str) -> Float8CurrentScalingQuantizer:
    return Float8CurrentScalingQuantizer(getattr(tex.DType, dtype), device=torch.device("cuda"))


def custom(format_: str, factory) -> tuple[str, ...]:
    settings = {"fp8": format_, "fp8_recipe": "custom", "fp8_quantizer_factory": f"{__name__}.{factory.__name__}"}
    return (*(f"mixed_precision.{name}={value}" for name, value in settings.items()), WHOLE, UNSTORED)


@on_hopper
@pytest.mark.parametrize("factory", [by_role, pytest.param(forward_only, marks=pytest.mark.since((2, 19)))])
def test_an_authors_factory_raises_no_alarm(factory) -> None:
    """The format of its recipe object, which no quantizer follows, is none in 2.11 and HYBRID in 2.20."""
    format_ = "hybrid" if factory is by_role else "e4m3"
    pretrain(tiny(TENSORWISE, "train.audit=stop", "audit.every=1", *custom(format_, factory)), quiet=True)


@on_hopper
def test_an_authors_factory_that_writes_another_format_is_named() -> None:
    assert "custom (grad_output e5m2 custom)" in found(TENSORWISE, *custom("e4m3", by_role))


# --- what the modules keep from step to step -------------------------------------------------------------------------------------------------
@on_hopper
def test_a_frozen_scale_is_named(monkeypatch) -> None:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    nothing = classmethod(lambda cls, forward=True: None)
    monkeypatch.setattr(FP8GlobalStateManager, "reduce_and_update_fp8_tensors", nothing)
    said = found(DELAYED)
    assert "delayed scales" in said
    assert "but the scale was not updated" in said


@on_hopper
def test_a_scale_that_its_history_does_not_explain_is_named(monkeypatch) -> None:
    original = tex.fused_amax_and_scale_update_after_reduction

    def half(buffer, histories, scales, *more) -> None:
        original(buffer, histories, scales, *more)
        for scale in scales:
            scale.mul_(0.5)

    monkeypatch.setattr(tex, "fused_amax_and_scale_update_after_reduction", half)
    assert "its history gives" in found(DELAYED)


@on_hopper
def test_amaxes_that_are_not_those_of_the_inputs_are_named(monkeypatch) -> None:
    original = tex.fused_amax_and_scale_update_after_reduction

    def quarter(buffer, *more) -> None:
        buffer.mul_(0.25)
        original(buffer, *more)

    monkeypatch.setattr(tex, "fused_amax_and_scale_update_after_reduction", quarter)
    said = found(DELAYED)
    assert "delayed scales" in said
    assert "the newest amax of its history" in said


@pytest.mark.parametrize(("fused", "change", "said_of_it"), [("true", lambda grad: grad * 2, "2 times its expected value"), ("false", lambda grad: grad.bfloat16(), "differs from")])  # fmt: skip
@on_hopper
def test_gradients_that_change_on_their_way_to_the_optimizer_are_named(fused, change, said_of_it) -> None:
    """Where a kernel adds weight gradients to their buffer, autograd still delivers those of norms."""

    def plant(engine) -> None:
        config = engine.configs.model
        finalize = config.finalize_model_grads_func

        def changed(*args, **kwargs) -> None:
            finalize(*args, **kwargs)
            for _, parameter in engine.named_parameters():
                parameter.main_grad.copy_(change(parameter.main_grad))

        config.finalize_model_grads_func = changed

    # a single micro-batch's gradients are BF16 numbers already
    more = (f"model.gradient_accumulation_fusion={fused}", "train.micro_batch_size=1", "train.global_batch_size=4")
    said = found(DELAYED, *more, hooks=(Plant(built=plant),))
    assert "gradients: promised reduced once" in said
    assert said_of_it in said
    assert ("linear_proj.weight" in said) is (fused == "false")


@pytest.mark.parametrize("recipe", [NVFP4] if BLACKWELL else [pytest.param(DELAYED, marks=slow), BLOCKWISE])
def test_a_loop_that_forgets_the_first_micro_batch_reads_old_weights_and_is_named(recipe, monkeypatch) -> None:
    from megatron.core.transformer.module import MegatronModule

    original, told = MegatronModule.set_is_first_microbatch, []

    def once(model) -> None:
        if not told:
            original(model)
        told.append(model)

    monkeypatch.setattr(MegatronModule, "set_is_first_microbatch", once)
    # the engine's own word
    monkeypatch.setattr("mpbridge.backend.megatron.inside_model.first_microbatch", lambda chunks: None)
    said = found(recipe, UNSTORED, "train.train_iters=4")
    assert "quantized copies as read" in said
    assert "set_is_first_microbatch" in said


@on_hopper
def test_transposes_of_an_earlier_step_are_named(monkeypatch) -> None:
    """Behind a gather between two steps megatron-core makes none (until a release behind 0.16), nor does the engine."""
    for place in ("fp8_utils", "distributed.param_and_grad_buffer"):
        monkeypatch.setattr(f"megatron.core.{place}.post_all_gather_processing", lambda weights: None)
    said = found(TENSORWISE, WHOLE, *OVERLAP)
    assert "quantized copies as read" in said
    assert "(its column copy)" in said


@on_blackwell
def test_column_copies_of_an_earlier_step_are_named() -> None:
    """dgrad reads them; row copies are right."""

    kept: list[torch.Tensor] = []

    def stale(linear) -> None:
        copy = linear.weight._columnwise_data
        if not kept:
            kept.append(copy.clone())
        copy.copy_(kept[0])

    said = found(MXFP8, *OVERLAP, "optimizer.lr=1e-2", hooks=(Before("layers.1.mlp.linear_fc1", stale),))
    assert "quantized weights as read" in said
    assert "layers.1.mlp.linear_fc1.weight" in said


STORED = [
    pytest.param(fault, engine, marks=() if engine == fault.engines[0] else slow)
    for fault in model_faults.FAULTS
    for engine in fault.engines
    if engine.startswith("lora stored")
]


@on_blackwell
@pytest.mark.parametrize(("fault", "engine"), STORED, ids=lambda value: getattr(value, "name", value))
def test_a_fault_of_a_base_stored_in_few_bits_is_named(fault, engine) -> None:
    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.registry import build_engine
    from tests.backend.engines import tiny

    with one_process(), device_layer(True):
        built = build_engine(tiny.run(model_faults.ENGINES[engine][0], **model_faults.ENGINES[engine][1]))
        try:
            check(lambda *kind, **sections: built, fault, engine, int(not fault.early))
        finally:
            built.close()


@on_hopper
@pytest.mark.parametrize("table", ["scaling_fwd", pytest.param("scaling_bwd", marks=slow)])
def test_a_scale_that_changes_between_two_steps_is_named(table) -> None:
    class Halved(Hook):
        def stepped(self, training, result) -> None:
            if training.counters.iteration == 1:
                module_of(training.engine, "layers.1.mlp.linear_fc1").fp8_meta[table].scale.mul_(0.5)

    said = found(DELAYED, hooks=(Halved(),))
    assert "delayed scales" in said
    assert "the step before left" in said


@on_hopper
def test_a_closed_model_leaves_no_amaxes_behind() -> None:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    pretrain(tiny(DELAYED), quiet=True)
    # an object of its own in later releases
    state = getattr(FP8GlobalStateManager, "quantization_state", FP8GlobalStateManager)
    assert not state.global_amax_buffer


@on_hopper
def test_a_lost_remainder_is_named() -> None:
    def lose(engine) -> None:
        for part in engine.optimizer.chained_optimizers:
            inner = part.optimizer
            step = inner.step

            def lossy(*args, inner=inner, step=step, **kwargs):
                step(*args, **kwargs)
                remainders = [state["master_param"] for state in inner.state.values() if "master_param" in state]
                assert remainders
                for remainder in remainders:
                    if remainder.dtype is torch.int16:
                        remainder.zero_()

            inner.step = lossy

    said = found("bf16_mixed", "optimizer.use_precision_aware_optimizer=true", hooks=(Plant(built=lose),))
    assert "bits of states" in said
    assert "(main weights)" in said


@on_hopper
def test_a_weight_that_passes_through_fp16s_subnormals_is_its_main_weight() -> None:
    main = torch.linspace(-1.1e-4, 1.1e-4, 4096).view(64, 64)
    quantizer = Float8CurrentScalingQuantizer(fp8_dtype=tex.DType.kFloat8E4M3, device=torch.device("cuda"))
    stored = quantizer(main.half())
    assert is_rounded(stored, main.flatten(), 0)
    assert not is_rounded(stored, (main + 2.0**-21).flatten(), 0)
