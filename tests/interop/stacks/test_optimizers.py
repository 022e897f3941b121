"""The optimizer that a stack's file names: its states, and how they are told (what each stack says of it is in test_readings)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from mpbridge.cli.main import main
from mpbridge.interop.stacks.importers import read_file, read_python
from mpbridge.interop.stacks.optimizers import optimizer_named

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
    kept = [
        value for value in optimizer.state[weight].values() if torch.is_tensor(value) and value.shape == weight.shape
    ]
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
    said = argparse.Namespace(
        bf16=True,
        fp8="hybrid",
        fp8_recipe="delayed",
        optimizer="sgd",
        sgd_momentum=0.0,
        use_distributed_optimizer=False,
    )
    torch.save({"args": said}, tmp_path / "common.pt")
    found = read_file(tmp_path)
    assert found.meaning.bytes_text == "10"
    assert not any(
        "--fp8-recipe" in line or "--optimizer" in line or "--use-distributed" in line for line in found.in_force
    )
    assert "--fp8-amax-history-len 1" in found.in_force


def test_import_and_compare_print_the_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}, "optimizer": {"type": "Lion"}}')
    assert main(["import", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "bytes per parameter (dense, Lion)" in printed
    assert "not said, decided by its defaults:\n  communication_data_type=bf16" in printed
    assert main(["import", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["optimizer"] == "Lion"
    assert told["in_force"]
    assert main(["compare", "bf16_mixed", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "bytes per parameter (dense, Adam and Lion)" in printed
    assert "none: Lion" in printed
    assert "They compute differently" in printed
