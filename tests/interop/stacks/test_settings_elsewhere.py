"""Settings that change what travels or runs from a place apart from the precision's own: none of them is passed over."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mpbridge.common.errors import BadValue
from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Imported
from mpbridge.interop.stacks.importers import read_args, read_python, read_text
from mpbridge.interop.stacks.nearest import answer, apart

FP32, BF16, FP16 = DType.FP32, DType.BF16, DType.FP16


def read(stack: str, **said: Any) -> Imported:
    return read_text(json.dumps(said), stack=stack, name="x.json")


def deepspeed(**said: Any) -> Imported:
    return read("deepspeed", bf16={"enabled": True}, **said)


def strategy(name: str, precision: str = "bf16-mixed", **arguments: Any) -> Imported:
    said = {"class_path": f"lightning.pytorch.strategies.{name}", "init_args": arguments}
    return read("lightning", trainer={"precision": precision, "strategy": said})


@pytest.mark.parametrize("stage", [7, -1, 1.5])
def test_a_stage_that_zero_lacks_is_a_fault(stage: float) -> None:
    with pytest.raises(BadValue, match=r"zero_optimization.stage=.*expected 0, 1, 2 or 3"):
        deepspeed(zero_optimization={"stage": stage})


@pytest.mark.parametrize("word", ["fp8", "float32", "uint8"])
def test_a_wire_that_deepspeed_refuses_contradicts_itself(word: str) -> None:
    found = deepspeed(communication_data_type=word)
    assert any(line.startswith(f"communication_data_type={word}: DeepSpeed refuses") for line in found.contradicts)
    assert found.meaning.wire in (BF16, FP32)


def test_what_travels_compressed_is_said() -> None:
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    lines = deepspeed(zero_optimization=zero).cannot_express
    assert [line.partition(":")[0] for line in lines] == [
        "zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_gradients",
    ]  # fmt: skip
    assert any("1 bit" in line for line in deepspeed(optimizer={"type": "OneBitAdam"}).cannot_express)
    assert not deepspeed(optimizer={"type": "AdamW"}, zero_optimization={"stage": 2}).cannot_express


def test_fp8_of_accelerate_under_deepspeed_is_fp8_around_bf16() -> None:
    found = read("accelerate", compute_environment="X", distributed_type="DEEPSPEED", mixed_precision="fp8")
    assert (found.meaning.storage, found.meaning.main) == (BF16, FP32)
    assert "delayed" in found.meaning.quantization
    assert found.fields["fp8_recipe"] == "delayed"


@pytest.mark.parametrize(("version", "autocast"), [(1, BF16), ("1", BF16), (2, None), ("2", None), (2.0, None)])
def test_the_version_of_fsdp_is_a_number(version: Any, autocast: DType | None) -> None:
    said = {"compute_environment": "X", "distributed_type": "FSDP", "mixed_precision": "bf16"}
    assert read("accelerate", **said, fsdp_config={"fsdp_version": version}).meaning.autocast is autocast


@pytest.mark.parametrize("key", ["fsdp_sharding_strategy", "fsdp_reshard_after_forward"])
def test_no_shard_divides_nothing(key: str) -> None:
    said = {"compute_environment": "X", "distributed_type": "FSDP", "mixed_precision": "bf16"}
    meaning = read("accelerate", **said, fsdp_config={key: "NO_SHARD"}).meaning
    assert (meaning.sharded, meaning.wire, meaning.bytes_text) == ("nothing", BF16, "16")
    assert read("accelerate", **said, fsdp_config={key: "SHARD_GRAD_OP"}).meaning.sharded == "everything"


def test_tf32_that_accelerate_switches_on_is_said() -> None:
    def lines(word: str, backend: str) -> tuple[str, ...]:
        said = {"compute_environment": "X", "mixed_precision": word, "dynamo_config": {"dynamo_backend": backend}}
        return read("accelerate", **said).cannot_express

    assert any("TF32" in line for line in lines("no", "INDUCTOR"))
    assert not lines("bf16", "INDUCTOR")
    assert not lines("no", "NO")


@pytest.mark.parametrize(("hook", "wire"), [("fp16_compress_hook", FP16), ("default_hooks.bf16_compress_hook", BF16)])
def test_a_hook_that_casts_gradients_decides_the_wire(hook: str, wire: DType) -> None:
    assert strategy("DDPStrategy", "32-true", ddp_comm_hook=hook).meaning.wire is wire
    assert strategy("DDPStrategy", ddp_comm_hook=hook).meaning.wire is wire
    other = strategy("DDPStrategy", ddp_comm_hook="powerSGD_hook")
    assert any("powerSGD_hook" in line for line in other.cannot_express)
    assert other.meaning.wire is FP32


def test_a_deepspeed_configuration_inside_lightnings_strategy_decides() -> None:
    config = {"zero_optimization": {"stage": 3}, "communication_data_type": "fp32"}
    found = strategy("DeepSpeedStrategy", config=config)
    assert (found.meaning.storage, found.meaning.wire, found.meaning.sharded) == (BF16, FP32, "everything")
    assert found.fields == read("deepspeed", bf16={"enabled": True}, **config).fields
    # its own section counts, whatever the word of the precision
    own = strategy("DeepSpeedStrategy", "16-mixed", config={"fp16": {"enabled": True, "loss_scale": 8}})
    assert own.meaning.loss_scale is not None
    assert own.meaning.loss_scale.static == 8
    file = strategy("DeepSpeedStrategy", config="ds.json")
    assert any("ds.json decides" in line for line in file.undecided)


@pytest.mark.parametrize("word", ["64-true", "transformer-engine"])
def test_a_precision_that_a_strategy_refuses_contradicts_itself(word: str) -> None:
    for name in ("fsdp", "deepspeed_stage_3"):
        assert any(
            "Lightning refuses" in line
            for line in read_args(f"precision={word} strategy={name}", stack="lightning").contradicts
        )
    assert not read_args(f"precision={word} strategy=ddp", stack="lightning").contradicts


# Megatron-LM, Bridge, torchtitan, AutoModel


@pytest.mark.parametrize(
    ("strategy", "sharded"),
    [
        ("no_shard", "nothing"),
        ("optim", "optimizer"),
        ("optim_grads", "gradients"),
        ("optim_grads_params", "everything"),
    ],
)
def test_megatron_fsdp_divides_what_its_strategy_says(strategy: str, sharded: str) -> None:
    text = f"--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy {strategy}"
    assert read_args(text).meaning.sharded == sharded


def test_megatron_fsdp_divides_nothing_by_default_before_it_had_flags_for_dtypes() -> None:
    text = "--bf16 --use-megatron-fsdp"
    assert (read_args(text).meaning.sharded, read_args(text, version="0.16").meaning.sharded) == (
        "everything",
        "nothing",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--bf16 --fp8-format e4m3 --fp8-recipe rowwise", "--fp8-recipe rowwise: the parser has no such recipe"),
        ("--bf16 --fp4-format e2m1 --fp4-recipe mxfp9", "--fp4-recipe mxfp9: the parser has no such recipe"),
        ("--bf16 --use-torch-fsdp2 --use-megatron-fsdp", "--use-torch-fsdp2 with --use-megatron-fsdp"),
    ],
)
def test_what_megatron_lm_lacks_contradicts_itself(text: str, said: str) -> None:
    assert any(line.startswith(said) for line in read_args(text).contradicts)


def test_odd_values_of_megatron_lms_options() -> None:
    with pytest.raises(BadValue, match="--bf16=true: it takes no value"):
        read_args("--bf16=true")
    with pytest.raises(BadValue, match="expected no_shard, optim"):
        read_args("--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy zero3")
    dynamic = read_args("--fp16 --loss-scale 0")
    assert (dynamic.meaning.loss_scale, dynamic.contradicts) == (read_args("--fp16").meaning.loss_scale, ())
    assert any("x.yaml: that file decides" in line for line in read_args("--yaml-cfg x.yaml").assumed)


def test_a_class_that_is_not_bridges_contradicts_itself() -> None:
    for target, odd in (("os.system", True), ("megatron.bridge.training.mixed_precision.MixedPrecisionConfig", False)):
        found = read("megatron-bridge", mixed_precision={"_target_": target, "bf16": True}, ddp={})
        assert any(line.startswith("mixed_precision._target_=") for line in found.contradicts) is odd


def titan(*converters: str) -> Imported:
    text = (
        "from torchtitan.components.quantization import Float8LinearConverter\ndef one():\n"
        f"    return Trainer.Config(training=TrainingConfig(), model_spec=model_registry('8B', converters=[{', '.join(converters)}]))\n"
    )
    return read_python(text, None, "one", stack="torchtitan")


FLOAT8 = "Float8LinearConverter.Config(filter_fqns=['lm_head', 'router.gate'])"


def test_torchtitans_experts_and_their_router_are_told_from_the_linears() -> None:
    whole = titan(FLOAT8, "Float8GroupedExpertsConverter.Config()")
    assert answer(whole.fields, engine=whole.engine, meaning=whole.meaning).recipe == "bf16_with_fp8_rowwise"
    assert not whole.cannot_express
    assert not any("dense" in line for line in whole.assumed)
    names = "fqns=['attention', 'shared_experts', 'feed_forward']"
    assert not titan(f"MXFP8LinearConverter.Config({names})", "MXFP8GroupedExpertsConverter.Config()").cannot_express
    assert any("a dense model" in line for line in titan(FLOAT8).assumed)
    for converters, line in {
        (FLOAT8, "MXFP8GroupedExpertsConverter.Config()"): "grouped GEMMs run in mxfp8; the linears have rowwise",
        ("Float8GroupedExpertsConverter.Config()",): "the linears are not quantized",
        (
            FLOAT8.replace(", 'router.gate'", ""),
            "Float8GroupedExpertsConverter.Config()",
        ): "router (router.gate) is quantized too",
        (
            "MXFP8LinearConverter.Config(fqns=['layers'])",
            "MXFP8GroupedExpertsConverter.Config()",
        ): "router (router.gate) is quantized too",
        ("MXFP8LinearConverter.Config(fqns=['attention'])",): "only linears whose names contain attention",
    }.items():
        assert any(line in one for one in titan(*converters).cannot_express), line


def test_converters_of_torchtitan_on_a_command_line_are_read() -> None:
    alone = read_args("--model.converters float8", stack="torchtitan")
    # its Float8 section had `recipe_name: ... | None = None`, which is torchao's Float8LinearConfig(): tensorwise
    assert "tensorwise" in alone.meaning.quantization
    assert "float8.recipe_name=tensorwise" in alone.in_force
    filtered = read_args(
        "--model.converters float8 --float8.filter_fqns output,layers.0.,layers.1.", stack="torchtitan"
    )
    assert (filtered.meaning.regions[0].first, filtered.meaning.regions[0].last) == (2, 0)
    assert not filtered.cannot_express
    other = read_args("--model.converters quantize,lora", stack="torchtitan")
    assert [line.partition(":")[0] for line in other.cannot_express] == [
        "model.converters=quantize",
        "model.converters=lora",
    ]


@pytest.mark.parametrize(("degree", "sharded"), [("1", "nothing"), ("8", "everything"), ("-1", "everything")])
def test_one_shard_divides_nothing(degree: str, sharded: str) -> None:
    found = read_args(f"--parallelism.data_parallel_shard_degree {degree}", stack="torchtitan")
    assert found.meaning.sharded == sharded


def test_main_weights_beside_narrow_moments_keep_both() -> None:
    adam = {
        "_target_": "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
        "master_weights": True,
        "exp_avg_dtype": "torch.bfloat16",
    }
    model = {"_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained", "torch_dtype": "bfloat16"}
    found = read("automodel", model=model, optimizer=adam)
    assert (found.meaning.main, found.meaning.exp_avg, found.meaning.exp_avg_sq) == (FP32, BF16, FP32)
    assert (found.fields["exp_avg_dtype"], found.fields["main_params_dtype"]) == ("bf16", "fp32")


def test_accelerates_file_has_a_margin_and_two_keys_that_nothing_reads() -> None:
    head = "compute_environment: X\ndistributed_type: MULTI_GPU\nmixed_precision: fp8\n"
    found = read_text(
        f"{head}fp8_config: {{backend: TE, margin: 2, amax_history_length: 16, amax_compute_algorithm: max}}",
        stack="accelerate",
    )
    assert (found.fields["fp8_margin"], found.fields["fp8_amax_history_len"]) == (2, 1024)
    assert [line.partition(":")[0] for line in found.inert] == [
        "fp8_config.amax_history_length", "fp8_config.amax_compute_algorithm",
    ]  # fmt: skip
    assert not any("margin" in line for line in found.assumed)
    assert not found.unknown


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("--tf32 True", True), ("--torch_compile True", True), ("--torch_compile_backend inductor --bf16", True),
        ("--tf32 False --torch_compile True", False), ("--torch_compile True --fp16", False), ("--bf16", False),
        ("--tf32 True --use_cpu", False),
    ],
)  # fmt: skip
def test_transformers_tf32_is_said(text: str, on: bool) -> None:
    found = read_args(text, stack="transformers")
    assert any("TF32 on CUDA" in line for line in found.cannot_express) is on


def test_a_strategy_of_fsdp1_divides_nothing_or_is_refused_under_fsdp2() -> None:
    second = read_args("--bf16 --fsdp no_shard", stack="transformers")
    assert any("Transformers refuses it" in line for line in second.contradicts)
    first = read_text(
        '{"bf16": true, "fsdp": "no_shard auto_wrap", "fsdp_config": {"version": 1}}', stack="transformers"
    )
    assert (first.meaning.sharded, second.meaning.sharded, first.contradicts) == ("nothing", "nothing", ())
    hybrid = read_text('{"bf16": true, "fsdp": ["hybrid_shard"], "fsdp_config": {"version": 1}}', stack="transformers")
    assert hybrid.meaning.sharded == "everything"


def test_scaling_queries_and_keys_by_layer_switches_the_fp32_softmax_on() -> None:
    text = "--bf16 --apply-query-key-layer-scaling --transformer-impl local"
    assert "attention_softmax_in_fp32" not in read_args(text, stack="megatron-lm").fields


def test_a_precision_aware_optimizer_needs_the_distributed_optimizer_and_adam() -> None:
    alone = read_args("--bf16 --use-precision-aware-optimizer --optimizer sgd", stack="megatron-lm").contradicts
    assert any("without --use-distributed-optimizer" in line for line in alone)
    assert any("takes only adam" in line for line in alone)
    whole = read_args("--bf16 --use-precision-aware-optimizer --use-distributed-optimizer", stack="megatron-lm")
    assert not whole.contradicts


def test_what_deepspeed_refuses_at_its_start_contradicts() -> None:
    base = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}, %s}'
    other = read_text(base % '"data_types": {"param_dtype": "fp32"}', stack="deepspeed")
    assert any("data_types.param_dtype=fp32" in line for line in other.contradicts)
    same = read_text(base % '"data_types": {"param_dtype": "bf16"}', stack="deepspeed")
    assert not same.contradicts
    removed = read_text('{"amp": {"enabled": true, "opt_level": "O2"}, "train_batch_size": 1}', stack="deepspeed")
    assert any(line.startswith("amp: removed") and "FP16" in line for line in removed.contradicts)
    assert not removed.unknown


def test_a_static_loss_scale_of_deepspeed_is_the_same_number_here() -> None:
    found = read_text('{"fp16": {"enabled": true, "loss_scale": 128}}', stack="deepspeed")
    told = answer(found.fields, engine=found.engine, meaning=found.meaning)
    assert "loss scale" not in " ".join(apart(told, found.meaning, engine=found.engine))
    assert not any("128" in text for pair in apart(told, found.meaning, engine=found.engine).values() for text in pair)


def test_settings_of_bridges_model_that_mixed_precision_overrides_are_named_by_their_values() -> None:
    text = "mixed_precision: {bf16: true, fp8: e4m3, fp8_recipe: mxfp8}\nmodel: {fp8: hybrid, fp8_recipe: delayed, fp8_margin: 0}"
    found = read_text(text, stack="megatron-bridge", name="run_config.yaml")
    assert [line.partition(":")[0] for line in found.inert] == ["model.fp8=hybrid", "model.fp8_recipe=delayed"]


def test_bridges_rules_by_module_are_said() -> None:
    found = read(
        "megatron-bridge", mixed_precision="bf16_mixed", model={"quant_recipe": {"matchers": [], "config_dict": {}}}
    )
    assert any(line.startswith("model.quant_recipe: rules by module") for line in found.cannot_express)
    assert not any("quant_recipe" in line for line in (*found.other, *found.assumed))


def test_a_run_of_bridge_without_mixed_precision_is_what_its_other_sections_say() -> None:
    def without(**said: Any) -> tuple[Imported, str]:
        found = read("megatron-bridge", mixed_precision=None, ddp={"grad_reduce_in_fp32": True}, **said)
        assert not any("decides nothing" in line for line in found.assumed)
        return found, str(answer(found.fields, engine=found.engine, meaning=found.meaning))

    assert without(model={"bf16": True, "fp4": "e2m1", "fp4_recipe": "nvfp4"})[1] == "bf16_with_nvfp4_mixed"
    fp8 = {"fp8": "hybrid", "fp8_param": True, "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
    found, told = without(model={"bf16": True, "params_dtype": "torch.bfloat16", **fp8})
    assert told == "bf16_with_fp8_delayed_scaling_mixed"
    assert "model.fp8_recipe=delayed" in found.in_force
    assert (
        "history 16 (max), margin 2"
        in without(model={"bf16": True} | fp8 | {"fp8_margin": 2, "fp8_amax_history_len": 16})[0].meaning.quantization
    )
    edges = {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "first_last_layers_bf16": True,
        "num_layers_at_end_in_bf16": 3,
    }
    found, _ = without(model={"fp16": True, **edges}, optimizer={"initial_loss_scale": 1024, "hysteresis": 1})
    assert (found.meaning.regions[0].first, found.meaning.regions[0].last) == (1, 3)
    assert (found.meaning.loss_scale.initial, found.meaning.loss_scale.hysteresis) == (1024, 1)  # type: ignore[union-attr]


def test_automodels_backend_tells_the_experts_from_the_linears() -> None:
    def backend(**said: Any) -> Imported:
        return read("automodel", model={"torch_dtype": "bfloat16", "backend": said}, step_scheduler={})

    mixture = backend(experts="torch_mm_mxfp8", gate_precision="float32")
    assert any("grouped GEMMs run in MXFP8" in line for line in mixture.cannot_express)
    assert (mixture.meaning.router, mixture.fields["moe_router_dtype"]) == (FP32, "fp32")
    refused = backend(linear="torch", te_fp8={"recipe": "current"})
    assert any("AutoModel raises ValueError" in line for line in refused.contradicts)
    experts = backend(linear="torch", experts="te", te_fp8={"recipe": "mxfp8"})
    assert not experts.contradicts
    assert any("only the experts are quantized" in line for line in experts.cannot_express)
    plain = backend(linear="torch", experts="te", dispatcher="torch", te_fp8={"recipe": "mxfp8"})
    assert any("AutoModel runs them with torch_mm" in line for line in plain.inert)
    assert any("AutoModel raises ValueError" in line for line in plain.contradicts)
