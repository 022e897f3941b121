"""Imports: the traps of each stack, one test each, and input that is not what it claims to be."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.common.errors import BadValue, DataError, MpbridgeError, UnknownName
from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Imported
from mpbridge.interop.stacks.importers import read_args, read_file, read_text
from mpbridge.interop.stacks.nearest import answer, apart
from mpbridge.precision.policy import LossScale

FP32, BF16, FP16 = DType.FP32, DType.BF16, DType.FP16


def lm(flags: str) -> Imported:
    return read_args(flags, stack="megatron-lm")


def told(found: Imported) -> str:
    return str(answer(found.fields, engine=found.engine, meaning=found.meaning))


# Megatron-LM


@pytest.mark.parametrize("sharded", ["", " --use-distributed-optimizer"])
def test_a_bf16_reduction_beside_fp32_main_weights_is_bf16_mixed_without_the_fp32_reduction(sharded: str) -> None:
    assert told(lm("--bf16 --grad-reduce-in-bf16" + sharded)) == "bf16_mixed, grad_reduce_in_fp32=false"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_bf16_keeps_fp32_main_weights(stage: int) -> None:
    text = f'{{"bf16": {{"enabled": true}}, "zero_optimization": {{"stage": {stage}}}}}'
    assert told(read_text(text, stack="deepspeed")).startswith("bf16_mixed, grad_reduce_in_fp32=false")


def test_fp8_format_alone_is_delayed_scaling_there_and_tensorwise_in_bridge() -> None:
    assert lm("--bf16 --fp8-format hybrid").fields["fp8_recipe"] == "delayed"
    bridge = read_text("mixed_precision: {bf16: true, fp8: hybrid}", stack="megatron-bridge", name="run_config.yaml")
    assert bridge.fields["fp8_recipe"] == "tensorwise"


def test_a_scaling_without_a_format_turns_nothing_on_and_may_move_the_main_weights() -> None:
    found = lm("--bf16 --fp8-recipe mxfp8")
    assert "fp8" not in found.fields
    assert any("nothing is quantized" in line for line in found.inert)
    assert any(
        "moves the main weights" in line
        for line in lm("--bf16 --use-precision-aware-optimizer --fp8-recipe mxfp8").inert
    )


@pytest.mark.parametrize(
    ("flags", "wire"),
    [
        ("--bf16", FP32),
        ("--bf16 --grad-reduce-in-bf16", BF16),
        ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", BF16),
        ("--fp16", FP16),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", FP32),
        ("--bf16 --use-torch-fsdp2 --accumulate-allreduce-grads-in-fp32", BF16),
        ("--bf16 --use-megatron-fsdp --accumulate-allreduce-grads-in-fp32", BF16),
        ("--bf16 --use-megatron-fsdp --megatron-fsdp-main-grads-dtype fp32", FP32),
    ],
)
def test_the_gradient_wire_is_what_its_parser_makes_of_the_flags(flags: str, wire: DType) -> None:
    assert lm(flags).meaning.wire is wire


def test_main_grads_in_bf16_contradict_or_switch_the_buckets() -> None:
    assert lm("--bf16 --main-grads-dtype bf16").contradicts
    assert lm("--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16").meaning.wire is BF16
    assert lm(
        "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32"
    ).contradicts


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--bf16 --num-layers-at-start-in-bf16 3", "first-last-layers-bf16"),
        ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-amax-history-len 16", "only under delayed scaling"),
        ("--bf16 --attention-softmax-in-fp32", "does not read it"),
        ("--bf16 --use-torch-fsdp2 --accumulate-allreduce-grads-in-fp32", "does not read it"),
        ("--bf16 --hysteresis 3", "without --fp16"),
    ],
)
def test_flags_without_an_effect_are_named(flags: str, word: str) -> None:
    assert any(word in line for line in lm(flags).inert)


def test_edge_layers_with_delayed_scaling_contradict() -> None:
    assert lm("--bf16 --fp8-format hybrid --first-last-layers-bf16").contradicts
    assert lm("--bf16 --fp8-format hybrid --transformer-impl local").contradicts


def test_a_constant_loss_scale_under_bf16_arrives() -> None:
    assert lm("--bf16 --loss-scale 8192").meaning.loss_scale is not None


def test_no_fp8_flag_becomes_plain_bf16_in_silence() -> None:
    for scaling in ("delayed", "tensorwise", "blockwise", "mxfp8"):
        found = lm(f"--bf16 --fp8-format e4m3 --fp8-recipe {scaling}")
        assert found.fields["fp8"] == "e4m3"
        assert scaling in found.meaning.quantization


def test_an_unknown_flag_is_told_from_one_that_is_not_about_precision() -> None:
    found = lm("--bf16 --grad-reduce-in-fp32 --swiglu --hidden-size 64")
    assert len(found.unknown) == 1
    assert "nearest: --grad-reduce-in-bf16" in found.unknown[0]
    assert found.other == ("--swiglu", "--hidden-size")


def test_a_flag_without_its_value_is_one_error_that_names_all() -> None:
    with pytest.raises(BadValue, match=r"(?s)--hysteresis x.*--fp8-recipe has no value"):
        lm("--bf16 --hysteresis x --fp8-recipe")


def test_a_launch_script_is_read_with_its_arrays_and_variables_and_says_what_a_branch_decides() -> None:
    script = """#!/bin/bash
# --fp16 in a comment is none
DTYPE=${DTYPE:-fp8}
ARGS=(
    --bf16   # the base
    --grad-reduce-in-bf16
)
FP8=( "--fp8-format hybrid" --fp8-recipe $RECIPE )
if [[ "$DTYPE" == "fp16" ]]; then
    ARGS+=( --fp16 )
fi
echo --fp16 > $(touch DANGER)
torchrun --nproc_per_node 8 pretrain_gpt.py \\
    ${ARGS[@]} ${FP8[@]} --lr 1e-4
"""
    found = read_text(script, name="train.sh", env={"RECIPE": "tensorwise"})
    assert told(found).startswith("bf16_with_fp8_current_scaling_mixed")
    assert found.meaning.wire is BF16
    assert not Path("DANGER").exists()
    assert any("--fp16 stands in `if` of line 9, which is not followed: not decided" in line for line in found.assumed)
    whole = read_text(script.replace("${FP8[@]}", '"${FP8[@]}"'), name="train.sh", env={"RECIPE": "x"})
    assert any("one word" in line for line in whole.unknown)


def test_a_variable_without_a_value_is_said() -> None:
    found = read_text("torchrun x.py --bf16 $EXTRA --lr 1", stack="megatron-lm", name="a.sh")
    assert any("$EXTRA has no value" in line for line in found.assumed)


def test_arguments_of_a_checkpoint_are_read_without_unpickling(tmp_path: Path) -> None:
    arguments = argparse.Namespace(
        bf16=True, fp8="hybrid", fp8_recipe="tensorwise", accumulate_allreduce_grads_in_fp32=True, hysteresis=2, params_dtype=torch.bfloat16,
        use_precision_aware_optimizer=True, exp_avg_dtype=torch.uint8, main_params_dtype=torch.float32, weights=torch.ones(3),
    )  # fmt: skip
    torch.save({"args": arguments, "iteration": 3}, tmp_path / "common.pt")
    seen: list[str] = []
    sys.addaudithook(lambda event, _: seen.append(event) if event == "pickle.find_class" else None)
    found = read_file(tmp_path)
    assert found.fields["fp8_recipe"] == "tensorwise"
    assert found.fields["exp_avg_dtype"] == "fp8"
    assert not found.inert
    assert seen == []


class _Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch PAYLOAD_RAN",)


def test_a_payload_in_a_checkpoint_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"args": argparse.Namespace(bf16=True, evil=_Payload()), "x": _Payload()}, tmp_path / "common.pt")
    assert read_file(tmp_path / "common.pt").fields["bf16"] is True
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(_Payload()))
    with pytest.raises(DataError, match="has no 'args'"):
        read_file(tmp_path / "plain.pt")
    assert not (tmp_path / "PAYLOAD_RAN").exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"PK\x03\x04broken", b"(" * 1000, b"\x80\x04]" + b"\x94" * 50 + b"h\xff."]
)
def test_a_broken_checkpoint_is_one_readable_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "common.pt").write_bytes(content)
    with pytest.raises(DataError, match=r"common\.pt"):
        read_file(tmp_path / "common.pt")


# Megatron Bridge


def bridge(text: str) -> Imported:
    return read_text(text, stack="megatron-bridge", name="run_config.yaml")


def test_an_override_below_a_recipe_name_is_refused_as_bridge_refuses_it() -> None:
    with pytest.raises(BadValue, match="OverridesError"):
        read_args("mixed_precision=bf16_mixed mixed_precision.fp8=hybrid", stack="megatron-bridge")


def test_contradicting_twins_end_with_the_gather_spelling_and_are_said() -> None:
    found = bridge("mixed_precision: {bf16: true, fp8: hybrid, fp8_param: true, fp8_param_gather: false}")
    assert any("wins there" in line for line in found.contradicts)
    assert found.fields.get("fp8_param_gather", False) is False


def test_what_ddp_says_of_a_field_of_mixed_precision_is_inert() -> None:
    found = bridge("{mixed_precision: bf16_mixed, ddp: {grad_reduce_in_fp32: false}}")
    assert found.meaning.wire is FP32
    assert any("takes precedence" in line for line in found.inert)


def test_edge_counts_default_to_none_at_all_there() -> None:
    found = bridge("mixed_precision: {bf16: true, fp8: hybrid, first_last_layers_bf16: true}")
    assert found.fields["num_layers_at_start_in_bf16"] == 0


def test_bridge_dtypes_are_names_and_no_target_is_imported() -> None:
    found = bridge(
        "mixed_precision: {_target_: os.system, bf16: true, params_dtype: {_target_: torch.bfloat16, _call_: false}}"
    )
    assert told(found) == "bf16_mixed"


def test_an_unknown_field_of_bridge_is_named_with_the_nearest() -> None:
    assert any(
        "nearest: fp8_recipe" in line for line in bridge("mixed_precision: {bf16: true, fp8_recip: mxfp8}").unknown
    )
    with pytest.raises(UnknownName):
        bridge("mixed_precision: bf16_mixd")


# torchtitan


def titan(text: str) -> Imported:
    return read_args(text, stack="torchtitan")


def test_torchtitans_defaults_are_fp32_storage_and_bf16_compute() -> None:
    assert told(titan("--training.steps 10")) == "fp32_params_bf16_compute"


def test_torchtitan_takes_float32_reduction_only() -> None:
    assert titan("--training.mixed_precision_reduce bfloat16").contradicts


def test_storage_narrower_than_compute_is_described_and_not_a_crash() -> None:
    found = titan("--training.dtype bfloat16 --training.mixed_precision_param float32")
    assert found.fields == {}
    assert found.meaning.storage is BF16
    assert any("narrower" in line for line in found.cannot_express)


def test_full_bf16_of_torchtitan_reduces_in_fp32_and_keeps_bf16() -> None:
    meaning = titan("--training.dtype bfloat16").meaning
    assert (meaning.wire, meaning.accumulator, meaning.exp_avg, meaning.bytes_text) == (FP32, BF16, BF16, "8/N")


def test_a_converter_is_taken_from_the_name_of_a_config_and_said() -> None:
    found = titan("--module llama3 --config llama3_8b_mxfp8")
    assert "mxfp8" in found.meaning.quantization
    assert any("mxfp8" in line for line in found.assumed)


# AutoModel


def automodel(text: str) -> Imported:
    return read_text(text, stack="automodel", name="recipe.yaml")


def test_a_partial_policy_loses_the_fp32_reduction() -> None:
    whole = "{model: {torch_dtype: float32}, distributed: {strategy: fsdp2}}"
    part = "{model: {torch_dtype: float32}, distributed: {strategy: fsdp2, mp_policy: {param_dtype: bfloat16}}}"
    assert automodel(whole).meaning.wire is FP32
    assert automodel(part).meaning.wire is BF16


def test_torch_adam_on_bf16_weights_is_full_bf16() -> None:
    meaning = automodel("{model: {torch_dtype: bfloat16}, optimizer: {_target_: torch.optim.AdamW}}").meaning
    assert (meaning.main, meaning.exp_avg, meaning.bytes_text) == (None, BF16, "8/N")


def test_fused_adam_without_master_weights_keeps_none() -> None:
    text = "{{model: {{torch_dtype: bfloat16}}, optimizer: {{_target_: a.b.FusedAdam, {}}}}}"
    assert automodel(text.format("lr: 1")).meaning.main is None
    assert automodel(text.format("master_weights: true, store_param_remainders: true")).meaning.remainders


def test_keys_beside_a_rowwise_recipe_are_ignored_there() -> None:
    found = automodel("{fp8: {enabled: true, recipe_name: rowwise, emulate: true}}")
    assert any("fp8.emulate" in line for line in found.inert)


def test_autocast_dtype_is_read_by_no_language_model_recipe() -> None:
    assert any("autocast_dtype" in line for line in automodel("{distributed: {autocast_dtype: bfloat16}}").inert)


@pytest.mark.parametrize(
    ("word", "dtype"), [("bf16", BF16), ("HALF", FP16), ("torch.float32", FP32), (16, BF16), (None, BF16)]
)
def test_its_dtype_words(word: Any, dtype: DType) -> None:
    import yaml

    assert automodel(yaml.safe_dump({"model": {"torch_dtype": word}})).meaning.storage is dtype


@pytest.mark.parametrize("word", ["fp32", "fp16", "fp8"])
def test_dtype_words_that_it_does_not_know_are_refused(word: str) -> None:
    with pytest.raises(BadValue, match=word):
        automodel(f"model: {{torch_dtype: {word}}}")


def test_a_policy_under_another_strategy_contradicts() -> None:
    for strategy in ("ddp", "megatron_fsdp"):
        assert automodel(f"distributed: {{strategy: {strategy}, mp_policy: {{param_dtype: bfloat16}}}}").contradicts


# accelerate, Lightning, DeepSpeed, transformers


def test_accelerate_reduces_in_bf16_on_fsdp_and_in_fp32_on_ddp() -> None:
    fsdp = read_text("{compute_environment: X, distributed_type: FSDP, mixed_precision: bf16}", name="a.yaml").meaning
    ddp = read_text(
        "{compute_environment: X, distributed_type: MULTI_GPU, mixed_precision: bf16}", name="a.yaml"
    ).meaning
    assert (fsdp.wire, fsdp.autocast, ddp.wire, ddp.autocast) == (BF16, BF16, FP32, BF16)
    text = "{compute_environment: X, distributed_type: FSDP, mixed_precision: bf16, fsdp_config: {fsdp_version: 2}}"
    second = read_text(text, name="a.yaml").meaning
    assert (second.wire, second.autocast) == (BF16, None)


def test_accelerate_fp8_runs_as_delayed_with_the_maximum() -> None:
    text = "{compute_environment: X, mixed_precision: fp8, fp8_config: {backend: TE, amax_compute_algo: most_recent}}"
    assert "amax history 1024 (max)" in read_text(text, name="a.yaml").meaning.quantization
    block = "{compute_environment: X, mixed_precision: fp8, fp8_config: {backend: TE, use_mxfp8_block_scaling: true}}"
    assert "mxfp8" in read_text(block, name="a.yaml").meaning.quantization


def test_accelerate_says_what_a_machine_would_make_of_a_word() -> None:
    def read(word: str, more: str = "") -> Imported:
        return read_text(
            f"{{compute_environment: X, distributed_type: FSDP, mixed_precision: {word}{more}}}", name="a.yaml"
        )

    assert any("on a CPU accelerate silently trains in FP32" in line for line in read("fp16").assumed)
    assert any("silently trains in FP16 under fp8" in line for line in read("fp8").assumed)
    assert not any("silently" in line for line in read("bf16").assumed)
    gathered = read("fp8", ", fp8_config: {backend: AO}")
    assert "tensorwise" in gathered.meaning.quantization
    assert any("are gathered in FP8" in line for line in gathered.cannot_express)
    apart = read("fp8", ", fp8_config: {backend: AO, enable_fsdp_float8_all_gather: false}")
    assert not any("are gathered in FP8" in line for line in apart.cannot_express)
    assert (gathered.meaning.wire, gathered.meaning.compute) == (BF16, BF16)


def test_lightning_refuses_fp16_under_model_parallelism_and_trains_bf16_on_a_cpu() -> None:
    assert any(
        "on a CPU Lightning trains BF16" in line for line in read_args("precision=16", stack="lightning").assumed
    )
    refused = read_args(
        "precision=16-mixed strategy=lightning.pytorch.strategies.ModelParallelStrategy", stack="lightning"
    )
    assert refused.contradicts == ("16-mixed: ModelParallelStrategy refuses it",)
    kept = read_args("precision=bf16-true strategy=ModelParallelStrategy", stack="lightning")
    assert not kept.contradicts
    assert any("configure_model" in line for line in kept.assumed)


def test_lightnings_mixed_and_true_are_one_under_deepspeed_and_two_elsewhere() -> None:
    def meaning(text: str) -> Any:
        return read_args(text, stack="lightning").meaning

    assert meaning("precision=bf16-mixed strategy=deepspeed") == meaning("precision=bf16-true strategy=deepspeed")
    assert meaning("precision=bf16-true strategy=fsdp").bytes_text == "8/N"
    assert meaning("precision=bf16-mixed strategy=fsdp").wire is BF16
    assert meaning("precision=bf16-mixed strategy=ddp").wire is FP32
    assert meaning("precision=bf16") == meaning("precision=bf16-mixed")


@pytest.mark.parametrize("word", ["16-mixed", "16-true"])
def test_lightnings_fp16_under_deepspeed_has_the_loss_scale_that_its_strategy_writes(word: str) -> None:
    found = read_args(f"precision={word} strategy=deepspeed_stage_2", stack="lightning")
    # DeepSpeedStrategy's own arguments: 2**16, a window of 1000, a hysteresis of 2, at least 1
    assert found.meaning.loss_scale == LossScale(initial=2.0**16, window=1000, minimum=1, hysteresis=2)
    assert found.fields["initial_loss_scale"] == 2.0**16
    data = {"class_path": "DeepSpeedStrategy", "init_args": {"stage": 2, "initial_scale_power": 12, "hysteresis": 4}}
    text = json.dumps({"trainer": {"precision": word, "strategy": data}})
    scale = read_text(text, stack="lightning", name="l.yaml").meaning.loss_scale
    assert scale == LossScale(initial=2.0**12, window=1000, minimum=1, hysteresis=4)
    assert read_args("precision=bf16-mixed strategy=deepspeed", stack="lightning").meaning.loss_scale is None


def test_a_loss_scale_is_written_from_lightning_as_from_the_other_torch_stacks() -> None:
    fields = read_args("precision=16-mixed", stack="lightning").fields
    other = read_args("--fp16", stack="transformers").fields
    names = ("initial_loss_scale", "loss_scale_window", "hysteresis")
    assert [fields[name] for name in names] == [other[name] for name in names] == [2.0**16, 2000, 1]


def test_lightnings_model_parallel_is_read_as_fsdp_in_both_spellings_and_a_misspelled_strategy_as_none() -> None:
    by_name = read_args("precision=bf16-true strategy=model_parallel", stack="lightning")
    by_class = read_args("precision=bf16-true strategy=ModelParallelStrategy", stack="lightning")
    assert by_name.meaning == by_class.meaning
    assert (by_name.meaning.sharded, by_name.engine) == ("everything", by_class.engine)
    wrong = read_args("precision=bf16-mixed strategy=fsdpp", stack="lightning")
    assert any("nearest: fsdp" in line for line in wrong.contradicts)
    assert wrong.meaning.sharded == "nothing"


def test_lightnings_command_line_takes_a_space_for_the_equals_sign() -> None:
    apart = read_args("--trainer.precision bf16-mixed --trainer.strategy fsdp", stack="lightning")
    assert apart == read_args("precision=bf16-mixed strategy=fsdp", stack="lightning")
    for text in ("--trainer.precision", "--trainer.precision --trainer.strategy ddp", "precision bf16-mixed"):
        with pytest.raises(BadValue, match="expected name=value or --name value"):
            read_args(text, stack="lightning")


def deepspeed(text: str) -> Imported:
    return read_text(text, stack="deepspeed", name="ds.json")


def test_deepspeeds_accumulator_and_wire_follow_the_model_unless_set() -> None:
    plain = deepspeed('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}').meaning
    assert (plain.wire, plain.accumulator, plain.bytes_text) == (BF16, BF16, "4 + 16/N")
    set_ = deepspeed(
        '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}'
    )
    assert (set_.meaning.wire, set_.meaning.accumulator) == (BF16, FP32)
    assert told(set_) == "bf16_mixed, grad_reduce_in_fp32=false, grad_accumulation_dtype=fp32"


@pytest.mark.parametrize(
    "text",
    [
        '{"bf16": {"enabled": true, "bf16_optimizer_states": true}, "zero_optimization": {"stage": 1}}',
        '{"bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}',
        '{"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}',
        '{"bf16": {"enabled": true}, "fp16": {"enabled": true}}',
    ],
)
def test_what_deepspeed_refuses_contradicts(text: str) -> None:
    assert deepspeed(text).contradicts


def test_deepspeeds_first_loss_scale_and_its_ignored_keys() -> None:
    found = deepspeed('{"fp16": {"enabled": true}, "zero_optimization": {"stage": 1}, "grad_accum_dtype": "fp32"}')
    assert found.meaning.loss_scale is not None
    assert found.meaning.loss_scale.initial == 2.0**16
    assert any("grad_accum_dtype" in line for line in found.inert)


def test_transformers_keeps_the_dtype_of_a_bf16_checkpoint() -> None:
    kept = read_args("--bf16 --dtype bfloat16", stack="transformers").meaning
    assert (kept.storage, kept.main, kept.exp_avg) == (BF16, None, BF16)
    assert any("the checkpoint's" in line for line in read_args("--bf16", stack="transformers").assumed)
    assert read_args("--bf16 --fsdp full_shard --dtype bfloat16", stack="transformers").meaning.storage is FP32


# bad input


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[1, 2", "x.yaml"),
        ("- a\n- b", "x.yaml"),
        ("a = [", "x.toml"),
        ("{}", "x.json"),
        ("import os", "config.py"),
        ("a: &a [*a]\nb: " + "[" * 3000, "x.yaml"),
    ],
)
def test_a_file_that_no_stack_wrote_is_one_readable_error(text: str, name: str) -> None:
    with pytest.raises(DataError):
        read_text(text, name=name)


def test_a_python_configuration_is_refused_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("raise SystemExit('ran')")
    with pytest.raises(DataError, match="would have to be executed"):
        read_file(tmp_path / "config.py")


def test_a_missing_file_and_a_binary_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_file(tmp_path / "nothing.yaml")
    (tmp_path / "x.sh").write_bytes(b"\0" * 100)
    with pytest.raises(MpbridgeError):
        read_file(tmp_path / "x.sh")


@pytest.mark.parametrize(
    "stack", ["megatron-bridge", "automodel", "torchtitan", "accelerate", "lightning", "deepspeed", "transformers"]
)
def test_random_plain_data_ends_in_an_answer_or_in_our_own_error(stack: str) -> None:
    import random

    import yaml

    words = [
        "bf16",
        "fp8",
        "mixed_precision",
        "distributed",
        "model",
        "optimizer",
        "trainer",
        "training",
        "enabled",
        "torch_dtype",
        "zero_optimization",
        "x",
    ]
    values: list[Any] = [None, True, -1, 3.5, "bf16", "hybrid", "", [1, "a"], "nan", {"enabled": "yes"}]
    for seed in range(40):
        pick = random.Random(seed)

        def tree(depth: int, pick: random.Random = pick) -> Any:
            if depth == 0 or pick.random() < 0.3:
                return pick.choice(values)
            return {pick.choice(words): tree(depth - 1) for _ in range(pick.randint(1, 4))}

        text = yaml.safe_dump({pick.choice(words): tree(3) for _ in range(3)})
        try:
            found = read_text(text, stack=stack, name="x.yaml")
        except MpbridgeError:
            continue
        str(answer(found.fields, engine=found.engine, meaning=found.meaning))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--bf16 --use-distributed-optimizer --use-precision-aware-optimizer", "bf16_mixed, use_precision_aware_optimizer=true"),
        ("--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype fp8", "bf16_mixed, exp_avg_dtype=uint8"),
        ("--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", "bf16_mixed_bf16_moments"),
        ("--bf16 --fp8-format hybrid --fp8-recipe mxfp8",
         "bf16_with_mxfp8_mixed, fp8=hybrid, fp8_param_gather=false, reuse_grad_buf_for_mxfp8_param_ag=false"),
        ("--bf16 --fp8-format e4m3 --fp8-recipe blockwise", "bf16_with_fp8_subchannel_scaling_mixed, fp8=e4m3"),
    ],
)  # fmt: skip
def test_a_command_line_is_named_after_its_own_engine_and_scaling(arguments: str, told: str) -> None:
    found = read_args(arguments, stack="megatron-lm")
    near = answer(found.fields, engine=found.engine, meaning=found.meaning)
    assert str(near) == told
    assert not apart(near, found.meaning, engine=found.engine)


SHARED = b")" + b"2\x86" * 60
"""A tuple that holds one tuple twice, which holds another twice: 2**60 values in 121 bytes."""


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(b"X\x01\x00\x00\x00a" + SHARED, id="a value"),
        pytest.param(SHARED + b"N", id="a name"),
        pytest.param(b"X\x01\x00\x00\x00a]q\x00h\x00a", id="a list of itself"),
    ],
)
def test_arguments_without_an_end_are_refused_at_once(tmp_path, value):
    """A pickle of some hundred bytes whose values would take ages to write down."""
    namespace = b"cargparse\nNamespace\n)\x81}(" + value + b"ub"
    (tmp_path / "common.pt").write_bytes(b"\x80\x02}(X\x04\x00\x00\x00args" + namespace + b"u.")
    started = time.process_time()
    with pytest.raises(DataError, match=r"nested too deep|more than 100000 values"):
        read_file(tmp_path / "common.pt")
    assert time.process_time() - started < 10


def test_switches_of_a_checkpoint_that_are_no_truth_values_are_one_error(tmp_path):
    torch.save({"args": argparse.Namespace(bf16="x", fp16=1)}, tmp_path / "common.pt")
    with pytest.raises(BadValue, match=r"(?s)bf16='x': expected True or False.*fp16=1"):
        read_file(tmp_path / "common.pt")
