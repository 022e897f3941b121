"""Whose arguments a command line holds: by the program that it starts and the names of its options, never Megatron-LM's without a word."""

from __future__ import annotations

import pytest

from mpbridge import recipes
from mpbridge.common.errors import DataError
from mpbridge.interop.stacks.importers import read_args, read_file, read_text
from mpbridge.interop.stacks.nearest import Answer, refusals

ARGUMENTS = {
    "megatron-lm": "--bf16 --fp8-format hybrid --num-layers 2",
    "lightning": "--precision bf16-mixed --strategy fsdp",
    "torchtitan": "--training.dtype bfloat16",
    "transformers": "--bf16 --output_dir out --do_train",
    "megatron-bridge": "mixed_precision=bf16_mixed train.train_iters=10",
}


@pytest.mark.parametrize("stack", ARGUMENTS)
def test_arguments_are_read_as_those_of_the_stack_that_has_them(stack: str) -> None:
    found = read_args(ARGUMENTS[stack])
    assert found.stack == stack
    assert not any("assumed, since" in line for line in found.assumed)
    assert found.meaning == read_args(ARGUMENTS[stack], stack=stack).meaning


@pytest.mark.parametrize(
    ("text", "why"),
    [("--bf16", "do not tell the stack"), ("--num-layers 2 --a 1 --b 2 --c 3", "1 of the 4 options"), ("--mine 3", "do not tell")],
)  # fmt: skip
def test_what_the_options_leave_open_is_said(text: str, why: str) -> None:
    found = read_args(text)
    assert found.stack == "megatron-lm"
    assert any("read as Megatron-LM's arguments: assumed" in line and why in line for line in found.assumed)
    assert not any("assumed, since" in line for line in read_args(text, stack="megatron-lm").assumed)


SCRIPTS = {
    "transformers": "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path gpt2 --bf16 --output_dir out --do_train",
    "torchtitan": "torchrun -m torchtitan.train --module llama3 --config llama3_8b --training.dtype bfloat16",
    "megatron-bridge": "torchrun scripts/run_recipe.py --recipe llama32_1b mixed_precision=bf16_with_fp8_current_scaling_mixed train.train_iters=10",
    "lightning": "python train.py fit --trainer.precision bf16-mixed --trainer.strategy fsdp",
    "megatron-lm": "torchrun pretrain_gpt.py --bf16 --num-layers 2 --micro-batch-size 1",
}


@pytest.mark.parametrize("stack", SCRIPTS)
def test_a_launch_script_is_read_as_that_of_the_program_that_it_starts(stack: str, file) -> None:
    script = file("run.sh", f"#!/bin/bash\n{SCRIPTS[stack]}\n")
    found = read_file(script)
    assert found.stack == stack
    assert read_file(script, stack=stack).meaning == found.meaning
    assert found.meaning.compute.short == "bf16"


def test_bridges_script_options_are_named_beside_its_overrides() -> None:
    found = read_text(f"#!/bin/bash\n{SCRIPTS['megatron-bridge']}", name="run.sh")
    assert found.fields["fp8_recipe"] == "tensorwise"
    assert any("--recipe llama32_1b" in line for line in found.assumed)


def test_launchers_are_refused_with_what_to_give() -> None:
    with pytest.raises(DataError, match="accelerate launch are not read: pass its file"):
        read_text("#!/bin/bash\naccelerate launch --mixed_precision fp8 --use_fsdp train.py --bf16", name="run.sh")
    with pytest.raises(DataError, match=r"DeepSpeed, whose settings stand in ds_config.json: pass that file"):
        read_text("#!/bin/bash\ndeepspeed train.py --deepspeed --deepspeed_config ds_config.json --fp16", name="run.sh")
    whole = "deepspeed pretrain_gpt.py --num-layers 2 --micro-batch-size 1 --deepspeed_config ds.json --bf16"
    found = read_text(f"#!/bin/bash\n{whole}", name="run.sh")
    assert found.stack == "megatron-lm"
    assert any("ds.json decides" in line for line in found.undecided)


@pytest.mark.parametrize(("options", "undecided"), [("--mixed_precision fp8", True), ("--num_processes 8", False)])
def test_a_trainer_under_accelerates_launcher_says_what_is_not_read(options: str, undecided: bool) -> None:
    found = read_args(f"accelerate launch {options} run_clm.py --dtype float32 --bf16 --output_dir out")
    assert found.stack == "transformers"
    assert any("the launcher shards the model or casts it" in line for line in found.undecided) is undecided
    said = "the options of accelerate launch before them are not read"
    assert any(said in line for line in found.assumed) is not undecided


def test_half_a_script_that_breaks_off_after_a_continuation_is_said() -> None:
    cut_off = read_text("torchrun pretrain_gpt.py --bf16 --num-layers \\\n", stack="megatron-lm")
    assert any("ends in a line continuation" in line for line in cut_off.assumed)
    whole = read_text("torchrun pretrain_gpt.py \\\n --bf16 # a \\\\", stack="megatron-lm")
    assert not any("ends in a line continuation" in line for line in whole.assumed)


def test_the_verb_recognizes_arguments(cli) -> None:
    assert cli("import", "--args", "--precision bf16-mixed --strategy fsdp", code=(0, 1)).startswith("lightning ")


def test_every_recipe_trains_on_its_own_engine_and_what_no_engine_takes_is_said() -> None:
    assert {name: lines for name in recipes if (lines := refusals(Answer(recipe=name, overrides={})))} == {}
    overrides = {"grad_reduce_in_fp32": False, "grad_accumulation_dtype": "fp32"}
    apart = refusals(Answer(recipe="bf16_mixed", overrides=overrides))
    assert any("accumulator-apart-from-the-wire" in line for line in apart)
    assert apart[-1].startswith("engine=megatron_fsdp allows it")
    said = refusals(Answer(recipe="bf16_mixed", overrides={}), {"optimizer": "muon", "muon_momentum": 1.5})
    assert said[0].startswith("muon_momentum=1.5 (0 to below 1): muon-settings-unknown")
    cast = refusals(Answer(recipe="fp32_params_bf16_compute", overrides={"autocast_enabled": True}))
    assert any("fsdp2-casts-by-itself" in line for line in cast)
