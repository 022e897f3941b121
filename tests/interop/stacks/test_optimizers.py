"""The optimizer that a stack's file names: its states, and how they are told (what each stack says of it is in test_readings)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from mpbridge import ConfigContainer, recipes
from mpbridge.interop.stacks.exporters import export
from mpbridge.interop.stacks.importers import read_args, read_file, read_python, read_text
from mpbridge.interop.stacks.meaning import rows
from mpbridge.interop.stacks.optimizers import optimizer_named
from mpbridge.settings.container import Run

MADE = [
    ("Adam", {}), ("AdamW", {}), ("NAdam", {}), ("RAdam", {}), ("Adamax", {}), ("SGD", {}), ("SGD", {"momentum": 0.9}), ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9}), ("Adagrad", {}), ("Adafactor", {}), ("Muon", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments"), MADE)
def test_states_are_those_that_torchs_class_keeps(name: str, arguments: dict[str, float]) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 6))
    optimizer = getattr(torch.optim, name)([weight], lr=0.1, **arguments)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = optimizer.state[weight].values()
    kept = [value for value in held if torch.is_tensor(value) and value.shape == weight.shape]
    found = optimizer_named(f"torch.optim.{name}", momentum=bool(arguments))
    assert found.exp_avg + found.exp_avg_sq == len(kept)
    assert found.exp_avg == bool({"exp_avg", "momentum_buffer"} & optimizer.state[weight].keys())


def test_of_several_groups_of_torchtitan_the_one_that_is_not_adam_is_shown() -> None:
    text = (
        "from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig\ndef one():\n"
        "    groups = [ParamGroupConfig(pattern='.*norm', optimizer_name='AdamW'), ParamGroupConfig(pattern='.*', optimizer_name='DistMuon')]\n"
        "    return Trainer.Config(training=TrainingConfig(), model_spec=model_registry('8B'), optimizer=OptimizersContainer.Config(param_groups=groups))\n"
    )
    found = read_python(text, None, "one", stack="torchtitan")
    assert found.meaning.optimizer.name == "Muon"
    assert any("embeddings, norms and biases" in line for line in found.cannot_express)


def test_arguments_in_a_checkpoint_are_all_said(tmp_path: Path) -> None:
    said = {"fp8": "hybrid", "fp8_recipe": "delayed", "optimizer": "sgd", "sgd_momentum": 0.0, "use_distributed_optimizer": False}  # fmt: skip
    torch.save({"args": argparse.Namespace(bf16=True, **said)}, tmp_path / "common.pt")
    found = read_file(tmp_path)
    assert found.meaning.bytes_text == "10"
    options = ("--fp8-recipe", "--optimizer", "--use-distributed")
    assert not [line for line in found.in_force if any(option in line for option in options)]
    assert "--fp8-amax-history-len 1" in found.in_force


def test_import_and_compare_print_the_optimizer(file, cli) -> None:
    said = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}, "optimizer": {"type": "Lion"}}'
    path = file("ds.json", said)
    printed = cli("import", path)
    assert "bytes per parameter (dense, Lion)" in printed
    assert "not said, decided by its defaults:\n  communication_data_type=bf16" in printed
    told = json.loads(cli("import", path, "--json"))
    assert told["optimizer"] == "Lion"
    assert told["in_force"]
    printed = cli("compare", "bf16_mixed", path)
    for words in ("bytes per parameter (dense, Adam and Lion)", "none: Lion", "They compute differently"):
        assert words in printed


EXPORTED: list[tuple[str, str, str, tuple[str, ...], str]] = [
    # (optimizer section of a run, stack and version, bytes per parameter there, what the pieces say, facts that are impossible there)
    ("muon", "megatron-lm", "14", ("--optimizer muon", "--muon-momentum 0.95", "--muon-fp32-matmul-prec medium", "--muon-num-ns-steps 5", "--muon-tp-mode "), ""),
    ("muon", "megatron-bridge", "14", ("optimizer: muon", "muon_scale_mode: spectral", "muon_nesterov: false", "use_distributed_optimizer: false"), ""),
    ("sgd", "megatron-lm", "14", ("--optimizer sgd", "--sgd-momentum 0.9"), ""),
    ("sgd", "fsdp2", "12/N", ("torch.optim.SGD(model.parameters(), momentum=0.9)",), ""),
    ("sgd", "automodel", "12/N", ("_target_: torch.optim.SGD", "momentum: 0.9"), ""),
    ("sgd", "deepspeed", "6 + 8/N", ('"type": "SGD"', '"momentum": 0.9'), ""),
    ("sgd", "transformers", "12", ('optim="sgd"', 'optim_args="momentum=0.9"'), ""),
    *(("muon", stack, size, (), "optimizer")
      for stack, size in (("fsdp2", "16/N"), ("automodel", "16/N"), ("deepspeed", "6 + 12/N"), ("torchtitan", "16/N"), ("accelerate", "16/N"), ("transformers", "16"))),
    ("sgd", "lightning", "16/N", (), "optimizer"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "stack", "size", "texts", "lost"), EXPORTED)
def test_a_runs_optimizer_is_written_or_named_as_lost(name: str, stack: str, size: str, texts: tuple[str, ...], lost: str) -> None:  # fmt: skip
    made = export("bf16_mixed", stack, run=trained_by(name))
    text = "\n".join(piece.text for piece in made.pieces)
    assert [word for word in texts if word not in text] == []
    assert ", ".join(line.fact for line in made.lines if line.fidelity == "impossible") == lost
    assert made.meaning.bytes_text == size
    assert not any(line.text.startswith("18 here") for line in made.lines)


@pytest.mark.parametrize("name", ["soap", "lion"])
@pytest.mark.parametrize(("version", "lost"), [("0.16", True), ("0.20", False)])
def test_an_optimizer_is_written_for_the_parsers_that_know_it(name: str, version: str, lost: bool) -> None:
    made = export("bf16_mixed", "megatron-lm", version=version, run=trained_by(name))
    assert (f"--optimizer {name}" in made.pieces[0].text) is not lost
    assert [line.fact for line in made.lines if line.fidelity == "impossible"] == ["optimizer"] * lost


def test_a_muon_of_torchs_fsdp2_is_exported_without_the_distributed_optimizer_that_megatron_lm_refuses() -> None:
    run = trained_by("muon", "fp32_params_bf16_compute")
    assert run.facts.engine == "fsdp2"
    text = export("fp32_params_bf16_compute", "megatron-lm", version="0.16", run=run).pieces[0].text
    assert "--optimizer muon" in text
    assert "--use-distributed-optimizer" not in text


SMALL = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}


def trained_by(name: str, recipe: str = "bf16_mixed", model: Mapping[str, Any] = {}, **said: object) -> Run:
    optimizer = {"lr": 1e-3, "optimizer": name, **said}
    return ConfigContainer(
        mixed_precision={"recipe": recipe}, engine=recipes[recipe].engine or "mcore", model=SMALL | model, optimizer=optimizer, data={"seq_length": 32}
    ).resolved(1, training=False)  # fmt: skip


MAMBA = {"hybrid_override_pattern": "M-M*", "mamba_num_heads": 4, "mamba_head_dim": 32, "mamba_num_groups": 1, "mamba_state_dim": 32}  # fmt: skip


@pytest.mark.parametrize(("version", "followed"), [("0.16", False), ("0.20", True)])
def test_fp4_on_a_hybrid_is_said_to_run_only_where_its_stack_enters_the_context(version: str, followed: bool) -> None:
    run = trained_by("adam", "bf16_with_nvfp4_mixed", MAMBA)
    made = export("bf16_with_nvfp4_mixed", "megatron-lm", version=version, run=run)
    assert ("--fp4-format" in made.pieces[0].text) is followed
    assert (made.fidelity != "impossible") is followed
    found = read_args("--bf16 --fp4-format e2m1 --is-hybrid-model", version=version)
    assert (rows(found.meaning)["quantization"] != "none") is followed
    assert any("never enters the FP4 context" in line for line in found.inert) is not followed
    alone = export("bf16_with_nvfp4_mixed", "megatron-lm", version=version)
    assert any("without Mamba layers" in line for line in alone.assumed) is not followed


@pytest.mark.parametrize(
    ("text", "kind", "wanted"),
    [
        ("--bf16 --optimizer muon --muon-fp32-matmul-prec low", "contradicts", "low: torch knows only medium"),
        ("--bf16 --optimizer muon --muon-fp32-matmul-prec high", "assumed", "optimizer.muon_fp32_matmul_prec=high here"),
        ("--bf16 --muon-fp32-matmul-prec high", "inert", "only Muon reads it"),
        ("--bf16 --optimizer dist_muon", "assumed", "optimizer.optimizer=dist_muon here"),
        ("--bf16 --optimizer sgd", "assumed", "optimizer.optimizer=sgd here"),
    ],
)  # fmt: skip
def test_an_optimizer_of_megatron_core_is_the_runs_and_no_loss(text: str, kind: str, wanted: str) -> None:
    flags = read_args(text)
    name, word = (re.search(rf"--{one} (\S+)", text) for one in ("optimizer", "muon-fp32-matmul-prec"))
    section = {"optimizer": name and name[1], "muon_fp32_matmul_prec": word and word[1]}
    settings = {"mixed_precision": "bf16_mixed", "optimizer": {key: value for key, value in section.items() if value}}
    bridge = read_text(json.dumps(settings), stack="megatron-bridge", name="x.yaml")
    for found in (flags, bridge):
        assert any(wanted in line for line in getattr(found, kind)), found
        assert not found.cannot_express


FIELDS = {one.name: one.default for one in dataclasses.fields(OptimizerConfig)}
NESTEROV = "muon_nesterov" if "muon_nesterov" in FIELDS else "muon_use_nesterov"  # the latter until 0.17
UNJUDGED = {"muon_coefficient_type", "muon_scalar_optimizer", "muon_use_syrk"}
"""What later releases have besides: rules, memory and audit know its defaults only, so a run may say no other value (docs/muon.md)."""
SETTINGS: dict[str, object] = {
    "muon_momentum": 0.7, "muon_split_qkv": False, NESTEROV: True, "muon_scale_mode": "shape_scaling", "muon_fp32_matmul_prec": "high",
    "muon_num_ns_steps": 7, "muon_tp_mode": "distributed", "muon_extra_scale_factor": 0.2,
}  # fmt: skip
"""Each of Muon's settings in megatron-core's OptimizerConfig with another value than its default."""


def test_every_setting_of_muons_in_megatron_cores_config_is_tried_below() -> None:
    assert {name for name in FIELDS if name.startswith("muon_")} - UNJUDGED == SETTINGS.keys()
    assert [name for name in SETTINGS if FIELDS[name] == SETTINGS[name]] == []


@pytest.mark.parametrize(("stack", "version"), [("megatron-lm", "0.16"), ("megatron-lm", "0.20"), ("megatron-bridge", "0.6")])  # fmt: skip
@pytest.mark.parametrize("names", [(), *((name,) for name in SETTINGS), tuple(SETTINGS)], ids=lambda names: names[0] if len(names) == 1 else str(len(names)))  # fmt: skip
@pytest.mark.parametrize("name", ["muon", "dist_muon"])
def test_muons_settings_come_back_from_what_was_exported(name: str, names: tuple[str, ...], stack: str, version: str) -> None:  # fmt: skip
    said = {one: SETTINGS[one] for one in names}
    made = export("bf16_mixed", stack, version=version, run=trained_by(name, **said))
    assert made.fidelity == "exact"
    text, lm = made.pieces[0].text, stack == "megatron-lm"
    flags = text.replace("\\\n", " ")
    found = read_args(flags, version=version) if lm else read_text(text, stack=stack, name="x.yaml")
    assert found.run == {"optimizer": name, **said}
    assert found.meaning.sharded == ("optimizer" if name == "dist_muon" else "nothing")
    assert not any("muon" in line for line in (*found.cannot_express, *found.contradicts, *found.inert))


def test_a_precision_that_megatron_lms_parser_has_no_word_for_is_named_as_lost() -> None:
    made = export("bf16_mixed", "megatron-lm", run=trained_by("muon", muon_fp32_matmul_prec="highest"))
    assert "--muon-fp32-matmul-prec" not in made.pieces[0].text  # its parser offers low, medium and high
    assert [line.fact for line in made.lines if line.fidelity == "impossible"] == ["muon_fp32_matmul_prec"]


def unusual(run: dict[str, object]) -> dict[str, object]:
    """What a run has to say here: not what the installed megatron-core does by itself (muon_tp_mode blockwise until 0.19, then duplicated)."""
    return {name: value for name, value in run.items() if FIELDS[name] != value}


@pytest.mark.parametrize(
    ("text", "version", "run", "size"),
    [
        # arguments.py of core_v0.16.1 and d98e8a64: momentum 0.9; muon_tp_mode blockwise, then duplicated
        ("--optimizer muon", "0.16", {"optimizer": "muon", "muon_momentum": 0.9, "muon_tp_mode": "blockwise"}, "14"),
        ("--optimizer muon", "0.20", {"optimizer": "muon", "muon_momentum": 0.9, "muon_tp_mode": "duplicated"}, "14"),
        ("--optimizer dist_muon", "0.16", {"optimizer": "dist_muon", "muon_momentum": 0.9, "muon_tp_mode": "blockwise"}, "6 + 8/N"),
        ("--optimizer dist_muon --muon-momentum 0.95", "0.20", {"optimizer": "dist_muon", "muon_tp_mode": "duplicated"}, "6 + 8/N"),
        ("--optimizer muon --use-distributed-optimizer --muon-tp-mode blockwise", "0.20", {"optimizer": "dist_muon", "muon_momentum": 0.9, "muon_tp_mode": "blockwise"}, "6 + 8/N"),
    ],
)  # fmt: skip
def test_the_parsers_defaults_are_those_of_its_version(text: str, version: str, run: dict[str, object], size: str) -> None:  # fmt: skip
    found = read_args(f"--bf16 {text}", version=version)
    assert found.run == unusual(run)
    assert found.meaning.bytes_text == size
    unsaid = [f"optimizer.{name}={value}" for name, value in unusual(run).items() if f"--{name.replace('_', '-')}" not in text]  # fmt: skip
    assert all(any(one in line and "nothing is said" in line for line in found.assumed) for one in unsaid)


@pytest.mark.parametrize(
    ("text", "version", "kind", "wanted"),
    [
        ("--optimizer muon --muon-scale-mode foo", "0.20", "contradicts", "--muon-scale-mode foo: refused there, which takes spectral"),
        ("--optimizer muon --muon-scalar-optimizer sgd", "0.20", "contradicts", "which takes adam, lion"),
        ("--optimizer muon --muon-coefficient-type polar_express", "0.20", "cannot_express", "--muon-coefficient-type polar_express"),
        ("--optimizer muon --muon-scalar-optimizer lion --lion-beta1 0.9", "0.20", "cannot_express", "--lion-beta1 0.9"),
        ("--optimizer muon --lion-beta1 0.9", "0.20", "inert", "--lion-beta1 0.9: only the Lion beside Muon"),
        ("--optimizer muon --sgd-momentum 0.8", "0.20", "inert", "--sgd-momentum 0.8: only SGD reads it, and the optimizer is muon"),
        ("--muon-nesterov", "0.20", "inert", "--muon-nesterov: only Muon reads it, and the optimizer is adam"),
        ("--optimizer muon --use-distributed-optimizer", "0.16", "contradicts", "refuses both together"),
        ("--optimizer soap --use-distributed-optimizer", "0.20", "cannot_express", "every rank keeps all states of soap"),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_followed_is_said(text: str, version: str, kind: str, wanted: str) -> None:
    found = read_args(f"--bf16 {text}", version=version)
    assert any(wanted in line for line in getattr(found, kind)), found


def test_bridges_distributed_optimizer_is_not_muons() -> None:
    settings = {"mixed_precision": "bf16_mixed", "optimizer": {"optimizer": "muon"}, "ddp": {"use_distributed_optimizer": True}}  # fmt: skip
    found = read_text(json.dumps(settings), stack="megatron-bridge", name="x.yaml")
    assert any("divided by layer" in line for line in found.contradicts)
    settings["optimizer"] = {"optimizer": "muon", "use_layer_wise_distributed_optimizer": True}
    found = read_text(json.dumps(settings), stack="megatron-bridge", name="x.yaml")
    assert not found.contradicts
    assert found.run["optimizer"] == "dist_muon"
    assert found.meaning.sharded == "optimizer"


def test_a_checkpoints_arguments_are_read_as_validate_args_leaves_them(tmp_path: Path) -> None:
    said = argparse.Namespace(
        bf16=True, optimizer="muon", use_layer_wise_distributed_optimizer=True, use_distributed_optimizer=False, muon_split_qkv=False, muon_nesterov=True, muon_momentum=0.95
    )  # fmt: skip
    torch.save({"args": said}, tmp_path / "common.pt")
    found = read_file(tmp_path)
    assert found.run == unusual({"optimizer": "dist_muon", "muon_split_qkv": False, NESTEROV: True, "muon_tp_mode": "duplicated"})  # fmt: skip


def test_muon_under_mxfp8_is_refused_with_the_bugs_number(cli) -> None:
    printed = cli("import", "--args", "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --optimizer dist_muon")
    assert "muon-under-mxfp8" in printed
    assert "#5707" in printed
