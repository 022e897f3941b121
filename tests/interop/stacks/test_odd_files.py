"""Files as teams have them: words that no parser takes, values of the wrong kind, settings beside the section that decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpbridge.common.errors import DataError, MpbridgeError
from mpbridge.interop.stacks.importers import read_args, read_file
from mpbridge.interop.stacks.nearest import answer, apart


@pytest.mark.parametrize("name", ["a.sh", "a.toml", "a.yaml", "a.json"])
@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_an_empty_file_is_no_configuration(name: str, text: str, file, cli) -> None:
    with pytest.raises(DataError):
        read_file(file(name, text))
    cli("import", file(name, text), code=2)


@pytest.mark.parametrize("field", ['"stage": 1e400', '"stage": 1' + 400 * "0", '"initial_scale_power": 999999999'])
def test_a_number_beyond_all_bounds_is_a_fault(field: str, file) -> None:
    path = file("zero.json", f'{{"zero_optimization": {{{field}}}, "fp16": {{"enabled": true, {field}}}}}')
    with pytest.raises(MpbridgeError, match="expected a number of at most"):
        read_file(path)


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


@pytest.fixture
def titan(file):
    return lambda body: read_file(Path(f"{file('config_registry.py', HEAD.replace('{}', body.replace(chr(10), chr(10) + '    ')))}:chosen"))  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        'setattr(c.training, "dtype", "bfloat16")',
        'more = {"dtype": "bfloat16"}\nc.training = TrainingConfig(steps=10, **more)',
        'c.training = TrainingConfig(**dict(dtype="bfloat16"))',
        'c = dataclasses.replace(c, training=dataclasses.replace(c.training, dtype="bfloat16"))',
    ],
)
def test_a_field_is_read_however_python_sets_it(body: str, titan) -> None:
    assert titan(body).meaning.storage.short == "bf16"


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
def test_what_only_running_would_tell_is_said(body: str, titan) -> None:
    found = titan(body)
    assert found.meaning.storage.short == "fp32"
    told = (*found.undecided, *found.assumed)
    assert any("unknown" in line or "known only at run time" in line for line in told), told


def test_a_misspelled_field_of_a_python_configuration_is_unknown(titan) -> None:
    assert titan('c.training.dtyp = "bfloat16"').unknown == ("training.dtyp (nearest: training.dtype)",)


def test_what_the_answer_means_otherwise_is_said(cli) -> None:
    found = read_args("--bf16 --use-torch-fsdp2")
    told = answer(found.fields, engine=found.engine, meaning=found.meaning)
    assert apart(told, found.meaning, engine=found.engine)["bytes"] == ("20/N", "16/N")
    shown = cli("import", "--args", "--bf16 --use-torch-fsdp2", code=(0, 1))
    assert "bytes per parameter (dense, Adam): 20/N there, 16/N here" in shown
    same = read_args("--bf16 --use-distributed-optimizer")
    assert not apart(answer(same.fields, meaning=same.meaning), same.meaning)


STAGED = """
mixed_precision: [{recipe: bf16_with_fp8_delayed_scaling_mixed, until: "80%"}, {recipe: bf16_mixed}]
model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, vocab_size: 256}
optimizer: {lr: 1.0e-3}
train: {train_iters: 100, global_batch_size: 8}
data: {seq_length: 32}
"""


def test_a_run_of_several_recipes_is_exported_one_by_one(file, cli) -> None:
    path, any_code = file("run.yaml", STAGED), (0, 1, 2)
    to = ("--to", "megatron-lm", "--config", path)
    second = cli("export", "bf16_mixed", *to, code=any_code)
    assert "until 80%, then bf16_mixed" in second
    assert "--fp8-format" not in second
    assert "--fp8-format" in cli("export", "bf16_with_fp8_delayed_scaling_mixed", *to, code=any_code)
    assert "name the one to export" in cli("export", "fp16_mixed", *to, code=any_code)
    assert "has stages" in cli("compare", "bf16_mixed", path, code=any_code)
    assert "a run configuration of mpbridge" in cli("import", path, code=any_code)
    file("run.yaml", STAGED.replace(STAGED.splitlines()[1], "mixed_precision: bf16_mixed"))
    assert "bytes per parameter" in cli("compare", "bf16_mixed", path).partition("alike")[0]


def test_the_accumulator_of_a_torch_engine_is_the_same_in_every_verb(cli) -> None:
    for words in (("show", "bf16_params_fp32_states"), ("plan", "mixed_precision.recipe=bf16_params_fp32_states")):
        assert "gradient accumulator                bf16" in cli(*words, code=(0, 1, 2))


def test_a_flag_is_a_word_too(cli) -> None:
    def rows(*words: str) -> list[str]:
        return cli("words", *words).splitlines()[1:]

    assert rows("--bf16") == rows("bf16")
    assert [row.split()[:2] for row in rows("--bf16", "--use-torch-fsdp2")] == [["megatron-lm", "--use-torch-fsdp2"]]
    assert rows("--fp8-format", "hybrid")
    for word in ("bf16", "16"):
        assert {row.split()[1] for row in rows(word) if row.startswith("lightning")} == {"one", "FSDP", "DeepSpeed,"}
