"""Imports whose file leaves to something else what the precision is: undecided, never a default taken in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("name", "text", "undecided"),
    [
        ("ds.json", {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}, ["bf16.enabled=auto: filled in by the launcher"]),
        ("both.json", {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, ["bf16.enabled=auto", "fp16.enabled=auto"]),
        ("bridge.json", {"ddp": {"grad_reduce_in_fp32": True}, "model": {"seq_length": 8}, "mixed_precision": None}, ["neither a mixed_precision section"]),
        ("args.json", {"output_dir": "o", "deepspeed": "zero3.json", "dtype": "float32"}, ["deepspeed=zero3.json decides: pass that file"]),
        ("accelerate.json", {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": {"deepspeed_config_file": "z.json"}}, ["z.json decides: pass that file"]),
        ("lightning.json", {"trainer": {"strategy": {"class_path": "lightning.pytorch.strategies.DeepSpeedStrategy", "init_args": {"config": "z.json"}}}}, ["config=z.json decides: pass that file"]),
        ("factory.json", {"output_dir": "o", "bf16": True, "finetuning_type": "lora"}, ["finetuning_type: of the program that reads this file"]),
        ("factory_dtype.json", {"output_dir": "o", "bf16": True, "finetuning_type": "full", "dtype": "float32", "fsdp": None}, []),
        ("trl.json", {"output_dir": "o", "bf16": True, "model_name_or_path": "x", "dtype": "bfloat16"}, ["the launcher of the program that reads this file"]),
        ("saved.json", {"output_dir": "o", "bf16": True}, ["the loading dtype: since version 5 that of the checkpoint"]),
        ("sharded.json", {"output_dir": "o", "bf16": True, "fsdp": "full_shard"}, []),
        ("nemo2.json", {"trainer": {"devices": 1}, "plugins": {"_target_": "nemo.lightning.MegatronMixedPrecision"}}, ["plugins beside trainer: of the program"]),
        ("nemo.json", {"trainer": {"precision": 16}, "model": {"megatron_amp_O2": False}}, ["model.megatron_amp_O2: of NeMo's Megatron models"]),
        ("eagle.json", {"recipe_args": {"target_model_name_or_path": "x"}, "distributed": {"strategy": "fsdp2"}, "optimizer": {"lr": 1}, "dist_env": {}}, ["recipe_args without a model"]),
        ("said.json", {"bf16": {"enabled": True}, "train_batch_size": "auto", "gradient_clipping": "auto"}, []),
    ],
)  # fmt: skip
def test_what_decides_elsewhere_is_undecided(name: str, text: object, undecided: list[str], file, cli) -> None:
    lines = json.loads(cli("import", file(name, json.dumps(text)), "--json", code=bool(undecided)))["undecided"]
    assert len(lines) == len(undecided)
    assert all(line.startswith(start) for line, start in zip(lines, undecided, strict=True))


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("torchrun x.py --bf16 --micro-batch-size 1 --fp8-format $(pick)", 1, "--fp8-format: its value is known only when the script runs"),
        ("if [ $# = 1 ]; then A=--fp16; fi\ntorchrun x.py --bf16 --micro-batch-size 1 $A", 1, "A=--fp16 stands in `if` of line 2"),
        ("A='--bf16'\nsrun job.sh $A --micro-batch-size 1", 1, "no command here starts a Python program: what it is started with decides"),
        ("A=(" + "--lr 1 " * 60 + ")\nif [ $# = 1 ]; then A=(${A[@]} --use-megatron-fsdp); fi\ntorchrun x.py --bf16 --micro-batch-size 1 ${A[@]}", 1, "A+=--use-megatron-fsdp stands in `if`"),
        ("A=(--bf16 --micro-batch-size 1)\nB=(--fp8-format hybrid)\nC=\"torchrun x.py ${A[@]} ${B[@]}\"\neval $C", 0, "bf16_with_fp8_delayed_scaling_mixed"),
        ("python x.py --lr-of-mine 1 trainer.nodes=2", 1, "read as Megatron-LM's arguments: assumed"),
        ("cat <<E > z.json\n{{\"fp16\": {{\"enabled\": true}}}}\nE\ntorchrun x.py --use-bnb-optimizer --deepspeed_config z.json", 1, "--use-bnb-optimizer: the program makes the optimizer itself"),
        ("accelerate launch --config_file z.yaml x.py --bf16 True --output_dir o --dtype float32", 1, "accelerate launch --config_file: the launcher shards"),
        ("torchrun x.py --micro-batch-size 1 --${9}", 1, "$9 has no value"),
        ("torchrun x.py --micro-batch-size 1 $PRECISION_ARGS", 1, "$PRECISION_ARGS has no value"),
        ("torchrun x.py --micro-batch-size 1 \"$@\"", 1, "has no values"),
        ("torchrun x.py --bf16 --micro-batch-size 1 --$MORE", 1, "$MORE has no value"),
        ("torchrun x.py --bf16 --micro-batch-size 1 $MORE", 0, "$MORE has no value"),
        ("torchrun x.py --bf16 --micro-batch-size 1 --lr $(pick)", 0, "--lr: its value"),
        ("torchrun x.py --bf16 --micro-batch-size 1 --deepspeed_config z.json", 1, "--deepspeed_config: z.json decides: pass that file"),
        ("cat <<E > z.json\n{{\"bf16\": {{\"enabled\": true}}, \"zero_optimization\": {{\"stage\": $Z}}}}\nE\ntorchrun x.py --fp16 --deepspeed_config=z.json", 0, "gradients on the wire               bf16"),
        ("cat <<E > z.json\n{{\"bf16\": {{\"enabled\": true}}, \"train_batch_size\": $((2*$Z))}}\nE\nA=\"--deepspeed_config z.json\"\nif [ $Z ]; then A=\"--lr 1 ${A}\"; fi\ntorchrun x.py --fp16 $A", 0, "deepspeed"),
        ("cat <<E > z.json\n{{\"bf16\": {{\"enabled\": $(pick)}}}}\nE\ntorchrun x.py --deepspeed_config z.json", 1, "bf16.enabled=auto: filled in by the launcher"),
        ("if [ $Z ]; then A=\"--deepspeed_config y.json\"; fi\ntorchrun x.py --bf16 --micro-batch-size 1 $A", 1, "A=--deepspeed_config y.json stands in `if`"),
        ("cat > z.json <<'E'\n{{\"bf16\": {{\"enabled\": \"$Z\"}}}}\nE\ntorchrun x.py --deepspeed_config z.json", 2, "bf16.enabled='$Z': expected true or false"),
    ],
)  # fmt: skip
def test_a_script_decides_or_is_undecided(script: str, code: int, said: str, file, cli) -> None:
    path = file("a.sh", f"#!/bin/bash\n{script.replace('{{', '{').replace('}}', '}')}\n")
    assert said in cli("import", path, "--env", "Z=1", code=code)


def test_nothing_is_written_that_is_undecided(file, tmp_path: Path, cli) -> None:
    path, written = file("ds.json", '{"bf16": {"enabled": "auto"}}'), tmp_path / "mine.yaml"
    said = cli("import", path, "--from", "deepspeed", "--write", written, code=2, error="beside", joined=True)
    assert "not written, since it is undecided: bf16.enabled=auto" in said
    assert not written.exists()


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ("--bf16", 0, "bf16_mixed"),
        ("--bf16 --hysteresis 3", 1, "has no effect there"),
        ("--bf16 --fp8-output-proj", 1, "mpbridge cannot express"),
        ("--bf16 --fp8-formt hybrid", 1, "unknown there"),
        ("--bf16 --swigluu", 0, "unknown there"),
        ("--from automodel {model: {torch_dtype: bfloat16}, optimizer: {_target_: torch.optim.AdamW}}", 0, "hazards:\n  weights and moments in BF16 without main weights"),
    ],
)  # fmt: skip
def test_the_exit_code_says_whether_something_is_lost_or_doubtful(args: str, code: int, said: str, file, cli) -> None:
    path = file("a.yaml", args.partition("{")[1] + args.partition("{")[2])
    assert said in cli("import", *(["--from", "automodel", path] if "{" in args else ["--args", args]), code=code)


@pytest.mark.parametrize(
    "text", ["mixed_precision: {recipe: bf16_mixed}\nddp: {}\n", "mixed_precision: [{recipe: fp32}]\nddp: {}\n", "extends: gpt_tiny\nddp: {}\n"]
)  # fmt: skip
def test_a_run_of_mpbridge_is_not_read_as_bridges(text: str, file, cli) -> None:
    assert "of mpbridge" in cli("import", file("run.yaml", text), code=2)


def test_json_may_have_tabs_and_torchtune_is_named(file, cli) -> None:
    cli("import", file("ds.json", '{\n\t"bf16": {"enabled": true},\n\t"zero_optimization": {"stage": 2}\n}'))
    tune = "output_dir: o\ndtype: bf16\nmodel: {_component_: torchtune.models.llama3.llama3_8b}\n"
    assert "torchtune" in cli("import", file("tune.yaml", tune), code=2)
