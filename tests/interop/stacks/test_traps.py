"""The forty traps between stacks, one test each: what a translator gets wrong unless it knows. Each was seen in the stack's own parser or source."""

from __future__ import annotations

import pytest

from mpbridge import recipes
from mpbridge.common.errors import BadValue
from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Imported
from mpbridge.interop.stacks.exporters import export
from mpbridge.interop.stacks.importers import read_args, read_python, read_text
from mpbridge.interop.stacks.known_keys import known
from mpbridge.interop.stacks.meaning import differences
from mpbridge.interop.stacks.megatron_lm_import import options

FP32, BF16, FP16 = DType.FP32, DType.BF16, DType.FP16


def lm(flags: str) -> Imported:
    return read_args(flags, stack="megatron-lm")


def bridge(text: str) -> Imported:
    return read_text(text, stack="megatron-bridge", name="run_config.yaml")


def titan(text: str) -> Imported:
    return read_args(text, stack="torchtitan")


def automodel(text: str) -> Imported:
    return read_text(text, stack="automodel", name="x.yaml")


def accelerate(text: str) -> Imported:
    return read_text(f"{{compute_environment: X, {text}}}", stack="accelerate", name="x.yaml")


def lightning(text: str) -> Imported:
    return read_args(text, stack="lightning")


def deepspeed(text: str) -> Imported:
    return read_text(text, stack="deepspeed", name="x.json")


def written(recipe: str, stack: str) -> str:
    return "\n".join(piece.text for piece in export(recipe, stack).pieces)


def said(lines: tuple[str, ...], *words: str) -> bool:
    return any(all(word in line for word in words) for line in lines)


def trap_01_fp8_format_alone_is_delayed_here_and_tensorwise_in_bridge() -> None:
    assert lm("--bf16 --fp8-format hybrid").fields["fp8_recipe"] == "delayed"
    assert bridge("mixed_precision: {bf16: true, fp8: hybrid}").fields["fp8_recipe"] == "tensorwise"
    assert "--fp8-recipe delayed" in written("bf16_with_fp8_delayed_scaling_mixed", "megatron-lm")


def trap_02_a_scaling_without_a_format_quantizes_nothing_and_moves_main_weights() -> None:
    found = lm("--bf16 --use-precision-aware-optimizer --fp8-recipe mxfp8")
    assert found.meaning.quantization == "none"
    assert said(found.inert, "moves the main weights")


def trap_03_which_reduction_flag_wins() -> None:
    assert lm("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32").meaning.wire is BF16
    assert lm("--fp16 --accumulate-allreduce-grads-in-fp32").meaning.wire is FP32
    assert lm("--fp16").meaning.wire is FP16
    assert lm("--bf16").meaning.wire is FP32


def trap_04_main_grads_in_bf16() -> None:
    assert lm("--bf16 --main-grads-dtype bf16").contradicts
    assert lm("--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16").meaning.wire is BF16


def trap_05_megatron_fsdp_reads_its_own_dtype_flags() -> None:
    assert lm("--bf16 --use-megatron-fsdp --accumulate-allreduce-grads-in-fp32").meaning.wire is BF16
    assert "--megatron-fsdp-main-grads-dtype" in written("bf16_megatron_fsdp", "megatron-lm")


def trap_06_torch_fsdp2_reads_no_gradient_flag() -> None:
    found = lm("--bf16 --use-torch-fsdp2 --accumulate-allreduce-grads-in-fp32")
    assert found.meaning.wire is BF16
    assert said(found.inert, "does not read it")


def trap_07_edge_counts_without_their_switch() -> None:
    assert said(lm("--bf16 --num-layers-at-start-in-bf16 3").inert, "without --first-last-layers-bf16")
    assert lm("--bf16 --fp8-format hybrid --first-last-layers-bf16").contradicts


def trap_08_settings_that_are_parsed_without_a_word() -> None:
    assert said(
        lm("--bf16 --fp8-format e4m3 --fp8-recipe tensorwise --fp8-amax-history-len 4").inert,
        "only under delayed scaling",
    )
    assert lm("--bf16 --loss-scale 8192").meaning.loss_scale is not None
    # Transformer Engine's recipe state takes E5M2 for the backward quantizers of a hybrid format, with blocks of 32 too
    both = lm("--bf16 --fp8-format hybrid --fp8-recipe mxfp8")
    assert said(both.contradicts, "E5M2")
    assert "hybrid" in both.meaning.quantization
    assert not lm("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8").contradicts
    assert said(lm("--bf16 --fp8-format hybrid --transformer-impl local").contradicts, "nothing is quantized")


def trap_09_facts_without_a_flag_are_no_options() -> None:
    for option in (
        "--store-param-remainders",
        "--fp8-dot-product-attention",
        "--fp8-multi-head-attention",
        "--params-dtype",
        "--pipeline-dtype",
    ):
        assert option not in options()
        assert lm(f"--bf16 {option}").unknown


def trap_10_softmax_in_fp32_does_nothing_under_transformer_engine() -> None:
    assert said(lm("--bf16 --attention-softmax-in-fp32").inert, "does not read it")
    assert "attention_softmax_in_fp32" not in lm("--bf16 --attention-softmax-in-fp32").fields
    # where it is read, no flag means off, and megatron-core's class, which a recipe leaves alone, has it on
    local = "--bf16 --transformer-impl local"
    assert lm(local).fields["attention_softmax_in_fp32"] is False
    assert "attention_softmax_in_fp32" not in lm(f"{local} --attention-softmax-in-fp32").fields


def trap_11_fp4_gather_is_a_flag_of_later_versions() -> None:
    assert "--fp4-param-gather" in options()
    assert lm("--bf16 --fp4-format e2m1 --fp4-param-gather --use-distributed-optimizer").fields["fp4_param"] is True


def trap_12_an_override_below_a_recipe_name_and_contradicting_twins() -> None:
    with pytest.raises(BadValue, match="OverridesError"):
        read_args("mixed_precision=bf16_mixed mixed_precision.fp8=hybrid", stack="megatron-bridge")
    assert said(
        bridge("mixed_precision: {bf16: true, fp8: hybrid, fp8_param: true, fp8_param_gather: false}").contradicts,
        "gather spelling wins",
    )


def trap_13_no_fp8_flag_is_lost_between_megatron_lm_and_bridge() -> None:
    for name in (
        "bf16_with_fp8_current_scaling_mixed",
        "bf16_with_fp8_delayed_scaling_mixed",
        "bf16_with_mxfp8_mixed",
        "fp16_mixed",
    ):
        flags = read_args(written(name, "megatron-lm").replace("\\\n", " "), stack="megatron-lm")
        yaml = bridge(written(name, "megatron-bridge"))
        assert flags.meaning.quantization == yaml.meaning.quantization
        assert flags.meaning.wire is yaml.meaning.wire


def trap_14_ddp_and_model_say_what_only_mixed_precision_is_heard_of() -> None:
    found = bridge(
        "{mixed_precision: bf16_mixed, ddp: {grad_reduce_in_fp32: false}, model: {fp8_param: true, fp8: hybrid}}"
    )
    assert found.meaning.wire is FP32
    assert found.meaning.quantization == "none"
    for setting in ("ddp.grad_reduce_in_fp32", "model.fp8_param", "model.fp8="):
        assert said(found.inert, setting, "takes precedence"), setting


def trap_15_quantization_is_not_on_torchtitans_command_line() -> None:
    made = export("bf16_with_fp8_rowwise", "torchtitan")
    assert any("Float8LinearConverter" in piece.text for piece in made.pieces)
    assert not any("float8" in piece.text.lower() for piece in made.pieces if piece.text.startswith("--"))


TITAN = """
from torchtitan.components.quantization import Float8LinearConverter, MXFP8LinearConverter
def one():
    return Trainer.Config(training=TrainingConfig(), model_spec=model_registry("8B", converters=[{converter}]))
"""


def titan_python(converter: str) -> Imported:
    return read_python(TITAN.format(converter=converter), None, "one", stack="torchtitan")


def trap_16_emulate_replaces_the_rowwise_recipe() -> None:
    found = titan_python('Float8LinearConverter.Config(recipe_name="rowwise", emulate=True)')
    assert said(found.cannot_express, "emulate=True", "tensorwise")


def trap_17_a_converter_without_names_takes_the_output_layer_too() -> None:
    assert said(titan_python("MXFP8LinearConverter.Config()").cannot_express, "lm_head")
    assert not said(titan_python('MXFP8LinearConverter.Config(filter_fqns=["lm_head"])').cannot_express, "lm_head")


def trap_18_torchtitan_reduces_in_float32_only() -> None:
    assert said(titan("--training.mixed_precision_reduce bfloat16").contradicts, "float32 only")


def trap_19_fsdp2_installs_the_policy_at_every_degree() -> None:
    found = titan("--training.steps 3")
    assert found.meaning.autocast is None
    assert said(found.assumed, "every sharding degree")


def trap_20_storage_narrower_than_compute_is_accepted_there() -> None:
    found = titan("--training.dtype bfloat16 --training.mixed_precision_param float32")
    assert (found.meaning.storage, found.meaning.compute) == (BF16, FP32)
    assert said(found.cannot_express, "narrower")


def trap_21_rowwise_ignores_the_settings_beside_it() -> None:
    found = automodel(
        "{fp8: {enabled: true, recipe_name: rowwise, emulate: true, enable_fsdp_float8_all_gather: true}}"
    )
    assert said(found.inert, "fp8.emulate")
    assert said(found.inert, "enable_fsdp_float8_all_gather")


def trap_22_autocast_dtype_is_read_by_no_language_model() -> None:
    found = automodel("{distributed: {autocast_dtype: bfloat16}}")
    assert said(found.inert, "autocast_dtype")
    assert found.meaning.autocast is None


def trap_23_fused_adam_without_master_weights_has_none() -> None:
    text = "{{model: {{torch_dtype: bfloat16}}, optimizer: {{_target_: a.FusedAdam, {}}}}}"
    assert automodel(text.format("lr: 1")).meaning.main is None
    assert automodel(text.format("master_weights: true")).meaning.main is FP32


def trap_24_its_dtype_words_are_its_own() -> None:
    assert automodel("model: {torch_dtype: HALF}").meaning.storage is FP16
    assert automodel("model: {torch_dtype: 32}").meaning.storage is BF16
    with pytest.raises(BadValue, match="fp32"):
        automodel("model: {torch_dtype: fp32}")


def trap_25_a_partial_policy_loses_the_fp32_reduction() -> None:
    assert automodel("{distributed: {mp_policy: {param_dtype: bfloat16}}}").meaning.wire is BF16
    assert automodel("{distributed: {mp_policy: null}}").meaning.wire is FP32
    text = written("bf16_mixed", "automodel")
    assert all(key in text for key in ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"))


def trap_26_accelerates_fsdp_reduces_in_bf16() -> None:
    assert accelerate("distributed_type: FSDP, mixed_precision: bf16").meaning.wire is BF16
    assert said(accelerate("distributed_type: FSDP, mixed_precision: bf16").assumed, "differs between versions")


def trap_27_autocast_stays_on_over_fsdp1() -> None:
    assert accelerate("distributed_type: FSDP, mixed_precision: bf16").meaning.autocast is BF16


def trap_28_fp8_on_fsdp_is_bf16_around_it_and_fp16_on_an_older_gpu() -> None:
    found = accelerate("distributed_type: FSDP, mixed_precision: fp8")
    assert (found.meaning.compute, found.meaning.wire) == (BF16, BF16)
    assert said(found.assumed, "silently trains in FP16 under fp8")


def trap_29_fp8_by_default_runs_the_maximum_of_1024_steps() -> None:
    for more in ("", ", fp8_config: {amax_compute_algo: most_recent}"):
        assert "amax history 1024 (max)" in accelerate(f"mixed_precision: fp8{more}").meaning.quantization


def trap_30_torchao_gathers_in_fp8_by_default_and_a_cpu_trains_fp32_under_fp16() -> None:
    assert said(accelerate("mixed_precision: fp8, fp8_config: {backend: AO}").cannot_express, "are gathered in FP8")
    assert said(accelerate("mixed_precision: fp16").assumed, "on a CPU accelerate silently trains in FP32")


def trap_31_bf16_is_bf16_mixed_and_16_on_a_cpu_trains_bf16() -> None:
    assert lightning("precision=bf16").meaning == lightning("precision=bf16-mixed").meaning
    assert said(lightning("precision=16").assumed, "on a CPU Lightning trains BF16")


def trap_32_mixed_and_true_are_one_under_deepspeed() -> None:
    assert (
        lightning("precision=bf16-mixed strategy=deepspeed").meaning
        == lightning("precision=bf16-true strategy=deepspeed").meaning
    )


def trap_33_lightnings_fsdp_reduces_in_bf16_unless_told() -> None:
    assert lightning("precision=bf16-mixed strategy=fsdp").meaning.wire is BF16
    told = "{trainer: {precision: bf16-mixed, strategy: {class_path: FSDPStrategy, init_args: {mixed_precision: {reduce_dtype: torch.float32}}}}}"
    assert read_text(told, stack="lightning", name="x.yaml").meaning.wire is FP32


def trap_34_model_parallel_strategy_refuses_16_mixed() -> None:
    found = lightning("precision=16-mixed strategy=ModelParallelStrategy")
    assert said(found.contradicts, "refuses it")
    assert said(found.assumed, "configure_model")


def trap_35_deepspeeds_wire_and_accumulator_follow_the_model() -> None:
    meaning = deepspeed('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}').meaning
    assert (meaning.wire, meaning.accumulator) == (BF16, BF16)
    other = deepspeed(
        '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}'
    ).meaning
    assert (other.wire, other.accumulator) == (BF16, FP32)


def trap_36_bf16_states_need_bf16_weights_and_zero() -> None:
    assert deepspeed(
        '{"bf16": {"enabled": true, "bf16_optimizer_states": true}, "zero_optimization": {"stage": 1}}'
    ).contradicts
    assert deepspeed('{"bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}').contradicts


def trap_37_fp32_accumulation_needs_zero() -> None:
    assert said(
        deepspeed('{"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}').contradicts, "without ZeRO"
    )


def trap_38_loss_scales_start_at_other_powers_and_unknown_keys_are_taken_at_the_top_alone() -> None:
    found = deepspeed('{"fp16": {"enabled": true}, "grad_accum_dtype": "fp32"}')
    scale, ours = found.meaning.loss_scale, lm("--fp16").meaning.loss_scale
    assert scale is not None
    assert ours is not None
    assert (scale.initial, ours.initial) == (2.0**16, 2.0**32)
    assert "initial_scale_power" in written("fp16_mixed", "deepspeed")
    assert said(found.inert, "grad_accum_dtype", "ignored")
    assert not found.contradicts
    assert said(deepspeed('{"fp16": {"enabled": true, "init_scale": 3}}').contradicts, "fp16.init_scale", "refuses")


def trap_39_deepspeeds_bf16_skips_steps_that_overflow() -> None:
    text = '{"bf16": {"enabled": true%s}, "zero_optimization": {"stage": 1}}'
    assert "check_grad_overflow" in known("deepspeed")["bf16"]
    skips = deepspeed(text % "")
    assert said(skips.assumed, "check_grad_overflow", "skipped, as in mpbridge")
    assert not skips.cannot_express
    assert said(deepspeed(text % ', "check_grad_overflow": false').cannot_express, "is applied; mpbridge skips it")
    assert lm("--bf16").meaning.loss_scale is None


def trap_40_transformers_keeps_the_dtype_of_the_checkpoint() -> None:
    kept = read_args("--bf16 --dtype bfloat16", stack="transformers").meaning
    assert (kept.storage, kept.main, kept.exp_avg) == (BF16, None, BF16)
    assert said(read_args("--bf16", stack="transformers").assumed, "the checkpoint's")
    assert read_args("--bf16 --fsdp full_shard --dtype bfloat16", stack="transformers").meaning.storage is FP32


TRAPS = {name: found for name, found in dict(globals()).items() if name.startswith("trap_")}


def test_there_are_forty_traps() -> None:
    assert sorted(int(name[5:7]) for name in TRAPS) == list(range(1, 41))
    assert "bf16_mixed" in recipes


@pytest.mark.parametrize("name", TRAPS)
def test_trap(name: str) -> None:
    TRAPS[name]()


# what resolve refuses is described


@pytest.mark.parametrize(
    ("stack", "text", "quantized", "left"),
    [
        ("megatron-lm", "--bf16 --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather --use-distributed-optimizer --reuse-grad-buf-for-mxfp8-param-ag", "blockwise", "reuse_grad_buf"),
        ("megatron-lm", "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --loss-scale -1", "tensorwise", "loss_scale"),
        ("megatron-lm", "--fp16 --hysteresis 0", "none", "hysteresis"),
        ("megatron-lm", "--bf16 --fp8-format e5m2", "none", "fp8=e5m2"),
        ("megatron-lm", "--fp8-format hybrid", "none", "fp8=hybrid"),
        ("megatron-lm", "--bf16 --output-logit-dtype fp64", "none", "logit_dtype"),
        ("megatron-lm", "--bf16 --fp8-format hybrid --fp4-format e2m1", "", "fp8"),
        ("megatron-bridge", "mixed_precision.bf16=true mixed_precision.fp8=hybrid mixed_precision.params_dtype=torch.float16", "tensorwise", "params_dtype"),
        ("megatron-bridge", "mixed_precision.bf16=true mixed_precision.fp16=true", "none", "only storage and communication"),
    ],
)  # fmt: skip
def test_what_resolve_refuses_is_described_with_what_is_left_out(
    stack: str, text: str, quantized: str, left: str
) -> None:
    found = read_args(text, stack=stack)
    assert quantized in found.meaning.quantization
    assert said(found.contradicts, "described", left), found.contradicts


@pytest.mark.parametrize(
    "word",
    ["fp8", "hybrid", "32-true", "16-true", "16-mixed", "bf16-mixed", "bf16-true", "no", "float8", "rowwise", "transformer-engine", "tensorwise", "delayed",
     "mxfp8", "nvfp4", "--bf16", "--bf16 --use-distributed-optimizer", "--bf16 --use-torch-fsdp2", "--bf16 --use-megatron-fsdp", "bf16_mixed", "bf16",
     "training.dtype=bfloat16", "torch_dtype: bfloat16", "strategy: megatron_fsdp", "strategy: ddp", "mixed_precision=bf16", "bf16=True", "bf16.enabled",
     "torch_autocast.enabled", "fp16", "fp32", "full_bf16"],
)  # fmt: skip
def test_every_word_answers(word: str) -> None:
    from mpbridge.interop.stacks.words import meanings

    assert meanings(word)


@pytest.mark.parametrize(
    ("word", "stack", "where", "args"),
    [
        ("bf16-mixed", "lightning", "DeepSpeed", "precision=bf16-mixed strategy=deepspeed"),
        ("16-true", "lightning", "DeepSpeed", "precision=16-true strategy=deepspeed"),
        ("--bf16 --use-distributed-optimizer", "megatron-lm", "--use-distributed-optimizer", "--bf16 --use-distributed-optimizer"),
    ],
)  # fmt: skip
def test_a_words_row_is_what_import_reads(word: str, stack: str, where: str, args: str) -> None:
    from mpbridge.interop.stacks.words import meanings

    row = next(one for one in meanings(word) if one.stack == stack and one.where.startswith(where))
    assert not differences(row.meaning, read_args(args, stack=stack).meaning).keys() - {"loss_scale"}


def test_a_words_row_of_mpbridge_is_its_recipe() -> None:
    from mpbridge.interop.stacks.words import meanings

    row = next(one for one in meanings("full_bf16") if one.stack == "mpbridge")
    assert (row.meaning.sharded, row.meaning.bytes_text) == ("nothing", "8")
