"""Files as teams have them: words that no parser takes, values of the wrong kind, settings beside the section that decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpbridge.cli.main import main
from mpbridge.common.errors import DataError, MpbridgeError
from mpbridge.interop.stacks.base import Imported
from mpbridge.interop.stacks.importers import read_args, read_file, read_text
from mpbridge.interop.stacks.nearest import answer, apart

SCRIPT = '#!/bin/bash\n{}\npython pretrain_gpt.py --num-layers 2 $A "${{B[@]}}"\n'


def script(text: str) -> Imported:
    return read_text(SCRIPT.format(text), name="a.sh")


def lightning(**trainer: Any) -> Imported:
    return read_text(json.dumps({"trainer": trainer}), stack="lightning", name="a.json")


def deepspeed(**config: Any) -> Imported:
    return read_text(json.dumps({"train_batch_size": 8, **config}), stack="deepspeed", name="ds.json")


def test_an_empty_mapping_is_every_default_and_is_said() -> None:
    found = read_text("{}", stack="deepspeed", name="ds.json")
    assert found.assumed[0] == "it is empty: every setting of deepspeed is at its default"


@pytest.mark.parametrize("name", ["a.sh", "a.toml", "a.yaml", "a.json"])
@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_an_empty_file_is_no_configuration(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError):
        read_file(tmp_path / name)
    assert main(["import", str(tmp_path / name)]) != 0


# --- words and values --------------------------------------------------------------------------------------------------------------------------
def test_words_that_no_option_takes_are_named() -> None:
    assert read_args("--bf16 true --fp8-format hybrid").unknown == ("true (a stray word)",)
    assert read_args("--bf16 fp8-format hybrid").unknown[0] == "fp8-format (a stray word; nearest: --fp8-format)"
    assert read_args("--bf16 true more", stack="transformers").unknown == ("more (a stray word)",)
    assert read_args("torchrun pretrain_gpt.py --bf16").fields["bf16"]
    for text in ("--training.dtype", "training.dtype bfloat16", "--training.dtype --training.steps 3"):
        with pytest.raises(MpbridgeError, match="training"):
            read_args(text, stack="torchtitan")


@pytest.mark.parametrize(
    ("stack", "text", "fault"),
    [
        ("deepspeed", '{"bf16": {"enabled": "yess"}}', "bf16.enabled='yess': expected true or false"),
        ("deepspeed", '{"bf16": true}', "bf16=True: expected a mapping"),
        ("deepspeed", '{"zero_optimization": 2, "bf16": {"enabled": true}}', "zero_optimization=2: expected a mapping"),
        ("transformers", '{"bf16": "ture"}', "bf16='ture': expected true or false"),
        ("megatron-bridge", "mixed_precision: bf16_mixed\nddp: {grad_reduce_in_fp32: flase}", "expected true or false"),
        ("megatron-bridge", "mixed_precision: bf16_mixed\noptimizer: {use_precision_aware_optimizer: 3}", "expected true or false"),
        ("automodel", "distributed: {strategy: [fsdp2]}", r"distributed.strategy=\['fsdp2'\]: expected a word"),
        ("automodel", "fp8: on_please", "fp8='on_please': expected a mapping"),
        ("accelerate", "mixed_precision: [bf16]", r"mixed_precision=\['bf16'\]: expected a word"),
        ("lightning", "trainer: bf16", "trainer='bf16': expected a mapping"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_a_fault_and_never_off(stack: str, text: str, fault: str) -> None:
    with pytest.raises(MpbridgeError, match=fault):
        read_text(text, stack=stack, name="a.yaml")


# --- who trains --------------------------------------------------------------------------------------------------------------------------------
def test_accelerates_megatron_is_megatron_and_no_autocast() -> None:
    text = "distributed_type: MEGATRON_LM\nmixed_precision: bf16\nmegatron_lm_config: {megatron_lm_use_distributed_optimizer: true}"
    found = read_text(text, name="a.yaml")
    told = answer(found.fields, engine=found.engine, meaning=found.meaning)
    assert (found.stack, str(told), found.meaning.autocast, found.meaning.bytes) == (
        "accelerate",
        "bf16_mixed",
        None,
        (6, 12),
    )
    whole = read_text(text.replace("optimizer: true", "optimizer: false"), name="a.yaml")
    assert whole.meaning.sharded == "nothing"
    assert any(
        "MULTI_GPUS" in line and "MULTI_GPU" in line
        for line in read_text("distributed_type: MULTI_GPUS", name="a.yaml").contradicts
    )


def test_lightnings_plugins_strategies_and_words() -> None:
    plugin = {
        "class_path": "lightning.pytorch.plugins.precision.TransformerEnginePrecision",
        "init_args": {"weights_dtype": "torch.bfloat16", "recipe": {"fp8_format": "E4M3", "amax_history_len": 16, "amax_compute_algo": "most_recent"}},
    }  # fmt: skip
    found = lightning(plugins=[plugin])
    assert found.meaning.quantization == "all linears: e4m3, delayed scaling, amax history 16 (most_recent), margin 0"
    assert (found.meaning.storage.short, found.other) == ("bf16", ())
    half = {"class_path": "lightning.pytorch.plugins.precision.HalfPrecision", "init_args": {"precision": "bf16-true"}}
    assert lightning(plugins=half).meaning.storage.short == "bf16"
    assert lightning(plugins=half, precision="16-mixed").contradicts
    assert lightning(precision=None).fields == lightning().fields
    assert lightning(precision=64).meaning.bytes == (32, 0)
    assert lightning(precision="64-true").fields == {}
    assert any("blabla" in line for line in lightning(precision="bf16-mixed", strategy="blabla").contradicts)
    for name in (
        "ddp_find_unused_parameters_true",
        "fsdp_cpu_offload",
        "deepspeed_stage_3_offload",
        "single_device",
        "xla",
    ):
        assert not lightning(precision="bf16-mixed", strategy=name).contradicts


def test_deepspeeds_narrow_main_weights_and_autocast() -> None:
    fp16 = {"enabled": True, "fp16_master_weights_and_grads": True}
    narrow = deepspeed(fp16=fp16, zero_optimization={"stage": 2})
    assert (narrow.meaning.main, narrow.meaning.exp_avg.short, narrow.meaning.bytes) == (None, "fp32", (2, 10))
    assert deepspeed(fp16=fp16).contradicts
    autocast = deepspeed(torch_autocast={"enabled": True, "dtype": "float16"}, zero_optimization={"stage": 1})
    assert (autocast.meaning.autocast, autocast.meaning.wire.short) == (autocast.meaning.compute, "fp16")
    assert autocast.meaning.loss_scale is not None
    assert deepspeed(torch_autocast={"enabled": True}, bf16={"enabled": True}).contradicts
    assert deepspeed(bf16={"enabled": True}, communication_data_typ="fp32").unknown == (
        "communication_data_typ (nearest: communication_data_type)",
    )


def test_automodels_filter_and_output_are_read_back() -> None:
    text = (
        "model: {{torch_dtype: float32}}\nfp8: {{enabled: true, recipe_name: tensorwise, filter_fqns: [{}]}}\n"
        "distributed: {{strategy: fsdp2, mp_policy: {{param_dtype: bfloat16, reduce_dtype: float32, output_dtype: float32}}}}"
    )
    found = read_text(text.format("lm_head, layers.0., layers.1., layers.10., layers.11."), name="a.yaml")
    assert found.meaning.quantization.startswith("linears of the first 2 and last 2 layers: not quantized")
    assert (found.meaning.output, found.fields["output_dtype"]) == (found.meaning.storage, "fp32")
    assert any("10 to 11" in line for line in found.assumed)
    told = read_text(text.format("layers.3., layers.7."), name="a.yaml").cannot_express
    assert [line.partition(":")[2].split()[0] for line in told] == ["the", "excludes"]


# --- Python configurations ---------------------------------------------------------------------------------------------------------------------
HEAD = """
import os, dataclasses
from torchtitan.trainer import Trainer
from torchtitan.config import TrainingConfig
from torchtitan.components.quantization import Float8LinearConverter
from . import model_registry

def base():
    return Trainer.Config(model_spec=model_registry("8B"), training=TrainingConfig(steps=10))

def chosen():
    c = base()
    {}
    return c
"""


def titan(body: str, tmp_path: Path) -> Imported:
    path = tmp_path / "config_registry.py"
    path.write_text(HEAD.replace("{}", body.replace("\n", "\n    ")))
    return read_file(Path(f"{path}:chosen"))


@pytest.mark.parametrize(
    "body",
    [
        'setattr(c.training, "dtype", "bfloat16")',
        'more = {"dtype": "bfloat16"}\nc.training = TrainingConfig(steps=10, **more)',
        'c.training = TrainingConfig(**dict(dtype="bfloat16"))',
        'c = dataclasses.replace(c, training=dataclasses.replace(c.training, dtype="bfloat16"))',
    ],
)
def test_a_field_is_read_however_python_sets_it(body: str, tmp_path: Path) -> None:
    assert titan(body, tmp_path).meaning.storage.short == "bf16"


@pytest.mark.parametrize(
    "body",
    [
        'if os.environ.get("X"):\n    c.training.dtype = "bfloat16"',
        "c.training = TrainingConfig(**os.environ)",
        'for name in os.environ:\n    setattr(c.training, name, "bfloat16")',
        'while os.getpid():\n    c.training.dtype = "bfloat16"',
        'match os.getpid():\n    case 1:\n        c.training.dtype = "bfloat16"',
        'try:\n    import torchao\nexcept ImportError:\n    c.training.dtype = "bfloat16"',
        'if os.environ.get("X"):\n    c.model_spec = model_registry("8B", converters=[Float8LinearConverter.Config()])',
        'c.model_spec = model_registry("8B", converters=[Float8LinearConverter.Config()] if os.environ.get("X") else [])',
        'vars(c.training)["dtype"] = "bfloat16"',
    ],
)
def test_what_only_running_would_tell_is_said(body: str, tmp_path: Path) -> None:
    found = titan(body, tmp_path)
    assert found.meaning.storage.short == "fp32"
    assert any("unknown" in line or "known only at run time" in line for line in found.assumed), found.assumed


def test_a_misspelled_field_of_a_python_configuration_is_unknown(tmp_path: Path) -> None:
    assert titan('c.training.dtyp = "bfloat16"', tmp_path).unknown == ("training.dtyp (nearest: training.dtype)",)


# --- what a recipe cannot say ------------------------------------------------------------------------------------------------------------------
def test_what_the_answer_means_otherwise_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = read_args("--bf16 --use-torch-fsdp2")
    told = answer(found.fields, engine=found.engine, meaning=found.meaning)
    assert apart(told, found.meaning, engine=found.engine)["bytes"] == ("20/N", "16/N")
    main(["import", "--args", "--bf16 --use-torch-fsdp2"])
    assert "bytes per parameter (dense, Adam): 20/N there, 16/N here" in capsys.readouterr().out
    same = read_args("--bf16 --use-distributed-optimizer")
    assert not apart(answer(same.fields, meaning=same.meaning), same.meaning)


STAGED = """
mixed_precision: [{recipe: bf16_with_fp8_delayed_scaling_mixed, until: "80%"}, {recipe: bf16_mixed}]
model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, vocab_size: 256}
optimizer: {lr: 1.0e-3}
train: {train_iters: 100, global_batch_size: 8}
data: {seq_length: 32}
"""


def test_a_run_of_several_recipes_is_exported_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(STAGED)

    def out(*words: str) -> str:
        main([*words])
        captured = capsys.readouterr()
        return captured.out + captured.err

    second = out("export", "bf16_mixed", "--to", "megatron-lm", "--config", str(path))
    assert "until 80%, then bf16_mixed" in second
    assert "--fp8-format" not in second
    first = out("export", "bf16_with_fp8_delayed_scaling_mixed", "--to", "megatron-lm", "--config", str(path))
    assert "--fp8-format" in first
    assert "name the one to export" in out("export", "fp16_mixed", "--to", "megatron-lm", "--config", str(path))
    assert "has stages" in out("compare", "bf16_mixed", str(path))
    assert "a run configuration of mpbridge" in out("import", str(path))
    path.write_text(STAGED.replace(STAGED.splitlines()[1], "mixed_precision: bf16_mixed"))
    assert "bytes per parameter" in out("compare", "bf16_mixed", str(path)).partition("alike")[0]


def test_the_accumulator_of_a_torch_engine_is_the_same_in_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", "bf16_params_fp32_states"])
    shown = capsys.readouterr().out
    assert "gradient accumulator                bf16" in shown
    main(["plan", "mixed_precision.recipe=bf16_params_fp32_states"])
    assert "gradient accumulator                bf16" in capsys.readouterr().out


def test_a_flag_is_a_word_too(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(*words: str) -> list[str]:
        assert main(["words", *words]) == 0
        return capsys.readouterr().out.splitlines()[1:]

    assert rows("--bf16") == rows("bf16")
    assert [row.split()[:2] for row in rows("--bf16", "--use-torch-fsdp2")] == [["megatron-lm", "--use-torch-fsdp2"]]
    assert rows("--fp8-format", "hybrid")
    for word, strategies in (("bf16", {"one", "FSDP", "DeepSpeed,"}), ("16", {"one", "FSDP", "DeepSpeed,"})):
        assert {row.split()[1] for row in rows(word) if row.startswith("lightning")} == strategies
