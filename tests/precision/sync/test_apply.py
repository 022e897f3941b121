"""Writing a plan into somebody else's objects: all or nothing, never as something else."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import types
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from sync_kit import FOREIGN, GPU, HERE, INPUTS, MODELS, POLICIES, applied, built, facts_of, fresh, live, planned

from mpbridge import apply, wrap
from mpbridge.common.errors import BadValue, Conflict, Refused, StalePlan, UnknownName, UpstreamRefused
from mpbridge.common.facts import Parallel, RunFacts
from mpbridge.compat import megatron_bridge
from mpbridge.planning.rules.table import broken
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.megatron_spec.versions import SINCE_017, current
from mpbridge.precision.resolve import resolve
from mpbridge.precision.sync.apply import commit
from mpbridge.precision.sync.plan import plan
from mpbridge.precision.sync.unkept import refuse_unkept
from tests.planning.rules.config_cases import SHAPE

BF16, CURRENT = POLICIES["bf16_mixed"], POLICIES["bf16_with_fp8_current_scaling_mixed"]


@dataclasses.dataclass
class Provider(TransformerConfig):
    """A model provider: defaults of its own, post-init deferred until finalize()."""

    vocab_size: int = 100
    attention_softmax_in_fp32: bool = False
    num_layers: int = 4
    hidden_size: int = 64
    num_attention_heads: int = 4

    def __post_init__(self) -> None:
        pass

    def finalize(self) -> None:
        TransformerConfig.__post_init__(self)


def test_a_provider_with_deferred_post_init_is_written_and_can_be_finalized() -> None:
    provider = Provider()
    made = plan(CURRENT, model=provider)
    assert made.conflicts == ()  # its own defaults are nobody's word
    apply(made, machine=GPU, versions=HERE)
    assert provider.ffn_hidden_size is None  # still not finalized
    provider.finalize()
    assert (provider.bf16, provider.fp8, provider.autocast_dtype) == (True, "hybrid", torch.bfloat16)
    assert provider.attention_softmax_in_fp32 is False


@pytest.mark.parametrize("carried_as", ["transformer", "config"])
def test_an_object_that_carries_its_config_is_written_there_and_nothing_lands_on_it(carried_as: str) -> None:
    inner = TransformerConfig(**INPUTS["dense"]["model"])
    outer = types.SimpleNamespace(**{carried_as: inner})
    before = set(vars(outer))
    apply(plan(BF16, model=outer))
    assert inner.params_dtype is torch.bfloat16
    assert set(vars(outer)) == before
    assert plan(BF16, model=outer).writes == ()


@pytest.mark.parametrize(("recipe", "distributed", "refusal"), [
    ("fp32_params_bf16_compute", False, "update 16-bit weights without main weights"),
    ("full_bf16", True, "silently creates FP32 main weights"), ("full_bf16", False, "call mpbridge.apply"),
])  # fmt: skip
def test_weights_that_megatron_core_would_keep_otherwise_are_refused(
    recipe: str, distributed: bool, refusal: str
) -> None:
    config, optimizer = TransformerConfig(**INPUTS["dense"]["model"]), OptimizerConfig()
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    model = types.SimpleNamespace(config=config)
    with pytest.raises(Refused, match=refusal):
        wrap(model, plan(recipe, model=config, optimizer=optimizer, ddp=ddp), optimizer)


UNSAID = {
    "main weights": MixedPrecisionConfig(bf16=True, params_dtype="fp32"),
    "main_params_dtype=fp16": MixedPrecisionConfig(fp16=True, main_params_dtype="fp16", grad_reduce_in_fp32=False),
    "main_grads_dtype=bf16": MixedPrecisionConfig(bf16=True, main_grads_dtype="bf16", grad_reduce_in_fp32=False),
    "grad_accumulation_dtype=fp32": MixedPrecisionConfig(bf16=True, grad_accumulation_dtype="fp32", grad_reduce_in_fp32=False),
    "output_dtype=fp32": MixedPrecisionConfig(bf16=True, output_dtype="fp32"),
    "logit_dtype=fp32": MixedPrecisionConfig(bf16=True, logit_dtype="fp32"),
}  # fmt: skip
"""Configs of which no field of megatron-core says the fact that the key names, on a DDP without a distributed optimizer."""


@pytest.mark.parametrize("said", UNSAID)
@pytest.mark.parametrize("realization", ["native", "emulated"])
def test_what_no_field_expresses_is_refused_before_anything_is_written(said: str, realization: Any) -> None:
    objects = live({**INPUTS["dense"], "optimizer": {"lr": 1e-3}, "ddp": {}})
    before = facts_of(objects)
    made = planned(objects, resolve(UNSAID[said]), realization=realization)
    with pytest.raises(Refused, match=said):
        apply(made)
    assert facts_of(objects) == before
    with pytest.raises(Refused, match=said):
        wrap(types.SimpleNamespace(config=objects.model), made, objects.optimizer)


RULES = {
    "main weights": "fp32-storage-under-16-bit-compute",
    "main_params_dtype=fp16": "fp16-parameters-alone",
    "main_grads_dtype=bf16": "states-need-precision-aware",
    "grad_accumulation_dtype=fp32": "accumulator-apart-from-the-wire",
    "output_dtype=fp32": "nothing-casts-what-is-returned",
}
"""Of all but logit_dtype, which the engine builds."""


@pytest.mark.parametrize("said", [said for said in UNSAID if said != "logit_dtype=fp32"])
def test_what_no_field_expresses_breaks_a_rule_of_megatron_cores_engine(said: str) -> None:
    found = broken(resolve(UNSAID[said]), RunFacts(shape=SHAPE))
    assert [one.rule for one in found if one.severity == "error"] == [RULES[said]]


@pytest.mark.parametrize(
    ("stages", "residual", "found"),
    [
        (1, True, ["nothing-casts-what-is-returned"]),
        (2, True, []),
        (2, False, ["nothing-casts-what-is-returned", "pipeline-dtype-is-what-is-sent"]),
    ],
)
def test_an_output_dtype_is_refused_unless_a_stage_sends_it(stages: int, residual: bool, found: list[str]) -> None:
    policy = resolve(MixedPrecisionConfig(bf16=True, fp32_residual_connection=residual, output_dtype="fp32"))
    sizes = Parallel(world_size=stages, pipeline=stages)
    run = RunFacts(shape=SHAPE, model={"fp32_residual_connection": residual}, parallel=sizes)
    assert sorted(one.rule for one in broken(policy, run) if one.severity == "error") == found


@pytest.mark.parametrize(
    ("core", "stages", "residual", "refused"),
    [("0.16.1", 2, True, True), ("0.20.0", 2, True, False), ("0.20.0", 2, False, True), ("0.20.0", 1, True, True)],
)
def test_an_output_dtype_is_refused_unless_megatron_cores_own_stages_return_it(
    core: str, stages: int, residual: bool, refused: bool
) -> None:
    # mpbridge's own models, which the rule judges, keep the stream in FP32 with 0.16.1 too
    inputs = MODELS["dense"] | {"pipeline_model_parallel_size": stages, "pipeline_dtype": torch.float32}
    objects = live({"model": inputs, "optimizer": {"lr": 1e-3}, "ddp": {}})
    config = MixedPrecisionConfig(bf16=True, fp32_residual_connection=residual, output_dtype="fp32")
    made = planned(objects, resolve(config))
    with pytest.raises(Refused, match="output_dtype=fp32") if refused else contextlib.nullcontext():
        refuse_unkept(made, core)
    alone = dataclasses.replace(
        made, targets={"ddp": objects.ddp}
    )  # a recipe that says nothing of the stream leaves it to the model
    with contextlib.nullcontext() if residual else pytest.raises(Refused, match="output_dtype=fp32"):
        refuse_unkept(alone, "0.20.0")


@pytest.mark.parametrize(
    ("core", "stages", "residual", "refused"),
    [("0.16.1", 2, True, True), ("0.16.1", 1, True, False), ("0.20.0", 2, True, False), ("0.20.0", 2, False, True)],
)
def test_a_pipeline_dtype_that_megatron_cores_own_stages_do_not_send_is_refused(
    core: str, stages: int, residual: bool, refused: bool
) -> None:
    inputs = MODELS["dense"] | {"pipeline_model_parallel_size": stages}
    config = MixedPrecisionConfig(bf16=True, fp32_residual_connection=residual, pipeline_dtype="fp32")
    made = plan(resolve(config), model=inputs, core=core)
    with pytest.raises(Refused, match="pipeline_dtype=fp32 on 2 stages") if refused else contextlib.nullcontext():
        refuse_unkept(made, core)
    # a first stage of the embedding alone sends the stream as it is
    refuse_unkept(plan(resolve(config), model=inputs | {"pipeline_model_parallel_layout": "E|ttL"}, core=core), core)


def test_wrap_and_megatron_bridges_names_judge_what_the_models_own_config_sends() -> None:
    policy = resolve(MixedPrecisionConfig(bf16=True, pipeline_dtype="fp32"))
    objects = live({"model": MODELS["dense"] | {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}, "optimizer": {"lr": 1e-3}, "ddp": {}})  # fmt: skip
    chunk = torch.nn.Module()
    chunk.config = objects.model
    with pytest.raises(Refused, match="pipeline_dtype=fp32 on 2 stages"):
        wrap(chunk, plan(policy, ddp=objects.ddp), objects.optimizer, ddp_config=objects.ddp)
    with pytest.raises(BadValue, match="pipeline_dtype=fp32 on 2 stages"):
        megatron_bridge.update_config_with_precision_overrides(
            megatron_bridge.MixedPrecisionConfig(bf16=True, pipeline_dtype=torch.float32), objects.model
        )


@pytest.mark.parametrize("residual", [False, True])
def test_megatron_cores_own_layer_rounds_an_fp32_residual_stream(residual: bool) -> None:
    add = get_bias_dropout_add(training=True, fused=False)
    branch, stream = (
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(4, dtype=torch.float32 if residual else torch.bfloat16),
    )
    kept = residual and SINCE_017.holds(current())
    assert add((branch, None), stream, 0.0).dtype is (torch.float32 if kept else torch.bfloat16)


RULE = MixedPrecisionConfig(
    bf16=True, modules={"mlp.linear_fc1": {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": True}}
)


def test_weights_that_a_rule_stores_are_refused_where_megatron_core_would_not_store_them() -> None:
    for core, realization, refused in (
        ("0.16.1", "native", True),
        ("0.16.1", "emulated", False),
        ("0.20.0", "native", False),
    ):
        made = planned(live(INPUTS["dense"]), resolve(RULE), realization=realization)
        with (
            pytest.raises(Refused, match=r"modules mlp\.linear_fc1 store weights in fp8.*0\.17 or later")
            if refused
            else contextlib.nullcontext()
        ):
            apply(
                made,
                machine=GPU,
                versions=dataclasses.replace(HERE, megatron_core=core),
                emulated=realization == "emulated",
            )


def test_what_a_config_decides_that_the_plan_was_not_given_is_not_judged() -> None:
    objects = live({**INPUTS["dense"], "optimizer": {"lr": 1e-3}, "ddp": {"use_distributed_optimizer": True}})
    policy = resolve(UNSAID["main_grads_dtype=bf16"])
    for part in ({"model": objects.model}, {"ddp": objects.ddp}, {"optimizer": objects.optimizer}):
        apply(plan(policy, **part))
    with pytest.raises(Refused, match="main_grads_dtype=bf16"):
        apply(planned(objects, policy))
    with pytest.raises(Refused, match="the distributed optimizer silently creates FP32"):
        apply(plan("full_bf16", ddp=objects.ddp))


def test_wrap_refuses_megatron_fsdp_which_it_does_not_build() -> None:
    objects = live({**INPUTS["dense"], "ddp": {"use_megatron_fsdp": True, "use_distributed_optimizer": True}})
    made = planned(objects, POLICIES["full_bf16"])
    apply(made)
    with pytest.raises(Refused, match=r"ddp\.use_megatron_fsdp=True, and wrap builds plain DDP: engine=megatron_fsdp"):
        wrap(types.SimpleNamespace(config=objects.model), made, objects.optimizer)


@pytest.mark.parametrize("glob", ["keep_fp32", "frozen"])
def test_what_wrap_does_later_is_written_and_said(glob: str, caplog: pytest.LogCaptureFixture) -> None:
    objects = live(INPUTS["dense"])
    with caplog.at_level(logging.WARNING, logger="mpbridge"):
        apply(planned(objects, resolve(MixedPrecisionConfig(bf16=True, **{glob: ("*norm*",)}))))
    assert objects.model.bf16 is True
    assert f"{glob}=['*norm*']: mpbridge.wrap does that" in caplog.text


def test_a_plain_namespace_is_written() -> None:
    bag = types.SimpleNamespace(**{field.name: None for field in dataclasses.fields(OptimizerConfig)})
    apply(plan(BF16, optimizer=bag))
    assert bag.params_dtype is torch.bfloat16


def test_upstreams_own_validation_runs_on_the_final_values_and_a_no_leaves_everything_as_it_was() -> None:
    stages = {"pipeline_model_parallel_size": 4, "pipeline_dtype": torch.float32}
    objects = live({**INPUTS["dense"], "model": INPUTS["dense"]["model"] | stages})
    before = facts_of(objects)
    said = r"megatron-core refuses the model config: num_layers_at_start_in_bf16 \(2\) must be between 0 and"
    with pytest.raises(UpstreamRefused, match=said):
        applied(objects, POLICIES["nemotron_h_bf16_with_fp8_current_scaling_mixed"])
    assert facts_of(objects) == before


def test_a_fault_of_one_target_takes_the_writes_of_all_back() -> None:
    objects = live(INPUTS["dense"])
    objects.optimizer.use_distributed_optimizer = False  # a precision-aware optimizer is the distributed one
    before = facts_of(objects)
    with pytest.raises(UpstreamRefused, match=r"only supported with distributed optimizer|requires FusedAdam"):
        commit(planned(objects, POLICIES["bf16_mixed_bf16_moments"]))
    assert facts_of(objects) == before


def test_without_transformer_engine_megatron_cores_type_error_reaches_the_user_in_words() -> None:
    optimizer = OptimizerConfig(lr=1e-3, use_distributed_optimizer=True)
    objects = types.SimpleNamespace(model=None, optimizer=optimizer, ddp=None)
    said = r"Transformer Engine, which is not installed|requires FusedAdam from TransformerEngine"
    with pytest.raises(UpstreamRefused, match=said):
        apply(planned(objects, POLICIES["bf16_mixed_bf16_moments"]))  # outside of the device layer


def test_a_fault_that_was_there_before_is_noted_and_not_ours() -> None:
    config = TransformerConfig(**INPUTS["dense"]["model"])
    # its second post-init raises, whatever we write
    config.num_attention_heads, config.tensor_model_parallel_size = 4, 3
    receipt = apply(plan(BF16, model=config))
    assert config.bf16 is True
    assert receipt.unchecked
    assert "num_attention_heads (4) must be a multiple" in receipt.unchecked[0]


def test_the_check_changes_nothing_but_the_plans_fields() -> None:
    lists = ["core_attn"]
    recompute = {"recompute_granularity": "selective", "recompute_modules": lists}
    provider = Provider(num_moe_experts=2, moe_layer_recompute=True, **recompute)
    apply(plan(BF16, model=provider))
    assert provider.recompute_modules is lists
    assert lists == ["core_attn"]  # megatron-core's post-init appends to it
    provider.finalize()
    assert lists == ["core_attn", "moe"]


def test_a_target_that_changed_after_the_plan_is_a_stale_plan() -> None:
    objects = live(INPUTS["dense"])
    made = planned(objects, BF16)
    objects.model.bf16 = objects.model.fp16 = True
    before = facts_of(objects)
    with pytest.raises(StalePlan, match=r"model\.bf16: false when planned, true now"):
        apply(made)
    assert facts_of(objects) == before


def test_on_conflict_error_refuses_and_warn_tells(caplog: pytest.LogCaptureFixture) -> None:
    objects = live({**INPUTS["dense"], "optimizer": {"lr": 1e-3, "loss_scale": 128.0}})
    said = r"optimizer\.loss_scale: was 128\.0, becomes none .*mixed_precision\.loss_scale=128\.0"
    with pytest.raises(Conflict, match=said):
        apply(planned(objects, BF16), on_conflict="error")
    assert objects.optimizer.loss_scale == 128.0
    with caplog.at_level(logging.WARNING, logger="mpbridge"):
        apply(planned(objects, BF16))
    assert "optimizer.loss_scale: was 128.0" in caplog.text
    with pytest.raises(BadValue, match="expected 'warn' or 'error'"):
        apply(planned(objects, BF16), on_conflict="fatal")  # type: ignore[arg-type]


def test_inputs_cannot_be_applied_to() -> None:
    with pytest.raises(BadValue, match="mapping of inputs"):
        apply(plan(BF16, ddp={"grad_reduce_in_fp32": False}))


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.quantized])
def test_quantization_is_refused_on_a_machine_that_would_train_it_in_16_bits(name: str) -> None:
    from mpbridge.common.machines import machine

    objects = live(INPUTS["dense"])
    before = facts_of(objects)
    for cpu in (machine("cpu"), "cpu"):
        with pytest.raises(Refused, match="cannot run this recipe"):
            apply(planned(objects, POLICIES[name]), machine=cpu)
    with pytest.raises(UnknownName, match="no machine named 'h10'"):
        apply(planned(objects, POLICIES[name]), machine="h10")
    without = dataclasses.replace(HERE, transformer_engine=None)
    # the right GPU without it: megatron-core would train in 16 bits, silently
    with pytest.raises(Refused, match=r"Transformer Engine|torchao"):
        apply(planned(objects, POLICIES[name]), machine=GPU, versions=without)
    assert facts_of(objects) == before


@pytest.mark.parametrize("name", FOREIGN)
def test_a_scaling_that_megatron_core_has_no_word_for_is_refused_where_it_could_run(name: str) -> None:
    objects = live(INPUTS["dense"])
    before = facts_of(objects)
    with pytest.raises(Refused, match=r"megatron-core has no setting for rowwise.*would train in 16 bits"):
        apply(planned(objects, FOREIGN[name]), machine=GPU, versions=HERE)
    assert facts_of(objects) == before


def test_a_plan_for_emulation_wants_to_hear_that_somebody_emulates() -> None:
    objects = live(INPUTS["dense"])
    made = planned(objects, CURRENT, realization="emulated")
    with pytest.raises(Refused, match="emulated=True"):
        apply(made)
    apply(made, emulated=True)
    assert (objects.model.bf16, objects.model.fp8) == (True, None)
    with pytest.raises(BadValue, match="native plan"):
        apply(planned(objects, CURRENT), emulated=True)
    applied(objects, BF16, realization="emulated")  # nothing to emulate, nothing to ask


@pytest.mark.usefixtures("core")
def test_the_receipt_holds_what_was_there_before_any_recipe() -> None:
    objects = live(INPUTS["dense"])
    first = applied(objects, POLICIES["fp16_mixed"])
    second = applied(objects, BF16, first)
    assert first.fields["model", "fp16"] == (False, True)
    assert second.fields["model", "fp16"] == (False, False)
    assert second.fields["model", "params_dtype"] == (torch.float32, torch.bfloat16)
    assert applied(objects, None, second).fields == {}


@pytest.mark.usefixtures("core")
def test_a_target_that_is_not_restored_keeps_its_way_back() -> None:
    objects, before = live(INPUTS["dense"]), facts_of(live(INPUTS["dense"]))
    receipt = applied(objects, POLICIES["fp16_mixed"])
    receipt = apply(plan(None, model=objects.model, after=receipt))
    assert {target for target, _ in receipt.fields} == {"optimizer", "ddp"}
    receipt = apply(plan(None, optimizer=objects.optimizer, ddp=objects.ddp, after=receipt))
    assert (facts_of(objects), receipt.fields) == (before, {})


@pytest.mark.usefixtures("core")
def test_derived_flags_follow_a_live_object() -> None:
    # OptimizerConfig computes it in post-init, which is over on a live object
    objects = live(INPUTS["dense"])
    receipt = applied(objects, POLICIES["bf16_mixed_bf16_moments"])
    flag = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
    assert getattr(objects.optimizer, flag) is True
    applied(objects, BF16, receipt)
    assert getattr(objects.optimizer, flag) is False


@pytest.mark.usefixtures("core")
def test_remainders_that_an_old_transformer_engine_switched_off_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.optimizer.optimizer_config.is_te_min_version", lambda *a, **k: False)
    objects = live(INPUTS["dense"])
    receipt = applied(objects, POLICIES["bf16_megatron_fsdp"])
    assert objects.optimizer.store_param_remainders is False
    applied(objects, BF16, receipt)
    assert objects.optimizer.store_param_remainders is True


@pytest.mark.usefixtures("te_version")
def test_padding_is_cleared_where_only_rules_for_modules_quantize() -> None:
    # TransformerConfig's post-init asks fp8 and fp4, not quant_recipe
    own = {"moe_router_padding_for_quantization": True, "moe_token_dispatcher_type": "alltoall"}
    inputs = {**INPUTS["moe"], "model": INPUTS["moe"]["model"] | own}
    with pytest.raises(ValueError, match="fp8/fp4 must be specified"):
        live(inputs)
    policy = resolve(MixedPrecisionConfig(bf16=True, modules={"mlp.*": "mxfp8"}))
    assert built(inputs, policy).model.moe_router_padding_for_quantization is False


@pytest.mark.usefixtures("te_version")
def test_padding_that_megatron_core_refuses_without_fp8_is_cleared_and_given_back() -> None:
    own = {"fp8": "hybrid", "moe_router_padding_for_fp8": True, "moe_token_dispatcher_type": "alltoall"}
    inputs = {**INPUTS["moe"], "model": INPUTS["moe"]["model"] | own}
    objects = live(inputs)
    assert objects.model.moe_router_padding_for_quantization is True  # the alias that post-init fills
    made = planned(objects, BF16)
    assert "moe_router_padding_for_quantization" not in {w.field for w in made.conflicts}
    receipt = applied(objects, BF16)
    assert facts_of(objects) == facts_of(fresh(inputs, BF16))
    applied(objects, None, receipt)
    assert facts_of(objects) == facts_of(live(inputs))
