"""Files as teams have them: words that no parser takes, values of the wrong kind, settings beside the section that decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpbridge.cli.main import main
from mpbridge.common.errors import DataError, MpbridgeError
from mpbridge.interop.stacks.base import Imported
from mpbridge.interop.stacks.importers import read_args, read_file
from mpbridge.interop.stacks.nearest import answer, apart


@pytest.mark.parametrize("name", ["a.sh", "a.toml", "a.yaml", "a.json"])
@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_an_empty_file_is_no_configuration(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError):
        read_file(tmp_path / name)
    assert main(["import", str(tmp_path / name)]) != 0


@pytest.mark.parametrize(
    "text",
    [
        '{"zero_optimization": {"stage": 1e400}}',
        '{"zero_optimization": {"stage": 1' + 400 * "0" + "}}",
        '{"fp16": {"enabled": true, "initial_scale_power": 999999999}}',
    ],
)
def test_a_number_beyond_all_bounds_is_a_fault(text: str, tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text(text)
    with pytest.raises(MpbridgeError, match="expected a number of at most"):
        read_file(tmp_path / "zero.json")


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
    told = (*found.undecided, *found.assumed)
    assert any("unknown" in line or "known only at run time" in line for line in told), told


def test_a_misspelled_field_of_a_python_configuration_is_unknown(tmp_path: Path) -> None:
    assert titan('c.training.dtyp = "bfloat16"', tmp_path).unknown == ("training.dtyp (nearest: training.dtype)",)


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
