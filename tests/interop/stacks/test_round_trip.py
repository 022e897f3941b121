"""import(export(x)) = x, for every recipe and stack: what an export means is what the importer says of it. Python is read as text."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mpbridge import MixedPrecisionConfig, recipes
from mpbridge.common.errors import BadValue, DataError
from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Export, Imported
from mpbridge.interop.stacks.exporters import STACKS, export
from mpbridge.interop.stacks.importers import read_args, read_file, read_python, read_text
from mpbridge.interop.stacks.meaning import differences
from mpbridge.interop.stacks.nearest import answer
from mpbridge.precision.registry import get_mixed_precision_config

SETS_UP = ("fsdp2", "accelerate", "lightning", "transformers")


def back(one: Export, more: str = "") -> Imported:
    """What the importers make of an export's pieces: torchtitan's arguments hold the dtypes, its Python the quantization. more: arguments of the run beside them."""
    texts = {piece.name: piece.text for piece in one.pieces}
    if one.stack in SETS_UP:
        return read_python(texts["python"], None, stack=one.stack)
    if "arguments" not in texts:
        return read_text(one.pieces[0].text, stack=one.stack, name=one.pieces[0].name)
    found = read_args(texts["arguments"].replace("\\\n", " ") + more, stack=one.stack)
    if "config_registry.py" not in texts:
        return found
    python = read_python(texts["config_registry.py"], None, stack=one.stack)
    return dataclasses.replace(
        found,
        fields={**found.fields, **python.fields} if found.fields else {},
        meaning=dataclasses.replace(found.meaning, regions=python.meaning.regions),
    )


UNWRITTEN = {
    # its router computes in FP32 whatever its text says: there is no text to be read back
    "torchtitan": ("router",),
    # true is what megatron-core's class has, so nothing differs from it that could be read back
    "megatron-bridge": ("softmax_fp32",),
    "megatron-lm": ("softmax_fp32",),
}


def lost(one: Export) -> dict[str, tuple[str, str]]:
    """Facts of an export that its importer does not give back, those that recipes state of the model among them."""
    unwritten = UNWRITTEN.get(one.stack, ())
    # megatron-core's own attention reads the softmax flag, Transformer Engine's does not
    whose = " --transformer-impl local" if one.stack == "megatron-lm" else ""
    apart = differences(one.meaning, back(one, whose).meaning)
    return {row: pair for row, pair in apart.items() if row != "bytes" and (row not in unwritten or "false" in pair)}


@pytest.mark.parametrize("stack", STACKS)
def test_what_was_exported_is_what_is_read_back(stack: str) -> None:
    made = {name: export(name, stack) for name in recipes}
    table = {name: lost(one) for name, one in made.items()}
    assert {name: rows for name, rows in table.items() if rows} == {}


BASES: dict[str, dict[str, Any]] = {
    "megatron's layout": {"bf16": True},
    "torch's layout": {"bf16": True, "params_dtype": "fp32", "main_params_dtype": "fp32"},
    "autocast": {"bf16": True, "params_dtype": "fp32", "main_params_dtype": "fp32", "autocast_enabled": True},
    "fp32": {"fp32": True},
    "autocast around bf16": get_mixed_precision_config("full_bf16").given() | {"autocast_enabled": True},
}
FACTS: dict[str, dict[str, Any]] = {
    "output_dtype": {"output_dtype": "fp32"},
    "pipeline_dtype": {"pipeline_dtype": "fp32"},
    "both": {"output_dtype": "fp32", "pipeline_dtype": "fp32"},
    "keep_fp32": {"keep_fp32": ("*norm*",)},
    "logit_dtype": {"logit_dtype": "fp32"},
    "moe_router_dtype": {"moe_router_dtype": "fp32"},
    "fp32_residual_connection": {"fp32_residual_connection": True},
    "residual and pipeline": {"fp32_residual_connection": True, "pipeline_dtype": "fp32"},
    "softmax in fp32": {"attention_softmax_in_fp32": True},
    "softmax as computed": {"attention_softmax_in_fp32": False},
}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("base", BASES)
def test_a_fact_that_a_recipe_states_is_read_back_where_the_export_claims_it(stack: str, base: str) -> None:
    made = {fact: export(MixedPrecisionConfig(**(BASES[base] | said)), stack) for fact, said in FACTS.items()}
    table = {fact: lost(one) for fact, one in made.items()}
    assert {fact: rows for fact, rows in table.items() if rows} == {}


@pytest.mark.parametrize("stack", STACKS)
def test_importing_an_exact_export_gives_the_recipe_back(stack: str) -> None:
    exact = {name: one for name in recipes if (one := export(name, stack)).fidelity == "exact"}
    assert exact, "a stack that says no recipe exactly would make this test say nothing"
    for name, one in exact.items():
        found = back(one)
        told = answer(found.fields, engine=found.engine, meaning=found.meaning)
        # ZeRO 1 is what DeepSpeed's export is written for, and its line about sharding says what reads it back
        divides = any(line.fact == "sharded" and "of the megatron-core engine" in line.text for line in one.lines)
        same = "bf16_mixed" if divides and name == "bf16_megatron_fsdp" else name
        assert told.recipe == same, f"{name} came back from {stack} as {told}"
        assert dict(told.overrides) == {}
        assert not found.contradicts


@pytest.mark.parametrize("stack", ["megatron-lm", "megatron-bridge", "accelerate", "lightning"])
def test_the_margin_of_delayed_scaling_comes_back(stack: str) -> None:
    config = get_mixed_precision_config("bf16_with_fp8_delayed_scaling_mixed").derive(
        fp8_margin=2, fp8_amax_history_len=16, fp8_amax_compute_algo="max"
    )
    one = export(config, stack)
    found = back(one)
    assert (found.fields["fp8_margin"], found.fields["fp8_amax_history_len"]) == (2, 16)
    assert found.meaning.regions[-1].quant == one.meaning.regions[-1].quant


@pytest.mark.parametrize("stack", ["accelerate", "transformers"])
def test_autocast_around_bf16_parameters_is_exported_where_a_stack_has_it(stack: str) -> None:
    config = MixedPrecisionConfig(**BASES["autocast around bf16"])
    one = export(config, stack)
    assert (one.fidelity, one.meaning.autocast, one.meaning.storage) == ("exact", DType.BF16, DType.BF16)
    assert lost(one) == {}


@pytest.mark.parametrize("stack", SETS_UP)
def test_a_set_up_is_recognized_by_its_calls_and_never_run(stack: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    text = export("fp32_params_bf16_compute", stack).pieces[0].text
    path.write_text(f"{text}\nopen({str(tmp_path / 'RAN')!r}, 'w')\n")
    assert read_file(path).stack == stack
    assert not (tmp_path / "RAN").exists()


def test_what_a_set_up_leaves_open_is_said() -> None:
    text = export("fp32_params_bf16_compute", "fsdp2").pieces[0].text
    found = read_python(text.replace("reduce_dtype=torch.float32", "reduce_dtype=args.dtype"), None)
    assert any("reduce_dtype" in line and "known only at run time" in line for line in found.assumed)
    assert found.meaning.wire.short == "bf16"  # what FSDP2 does without a reduce_dtype
    under = read_python(f"{text}\nif args.long:\n    fully_shard(model)\n", None)
    assert any("under `if args.long`" in line for line in under.assumed)


@pytest.mark.parametrize("stack", [one for one in STACKS if one not in (*SETS_UP, "torchtitan", "megatron-bridge")])
def test_python_of_a_stack_without_python_settings_is_refused_with_its_name(stack: str) -> None:
    with pytest.raises(DataError, match=rf"{stack} is not configured in Python.*fsdp2"):
        read_python("import torch\n", None, stack=stack)


@pytest.mark.parametrize("stack", SETS_UP)
def test_a_script_without_the_call_that_decides_is_refused_by_that_call(stack: str) -> None:
    with pytest.raises(DataError, match=rf"it has no \w+\(\.\.\.\).*{stack}"):
        read_python("import torch\n", None, stack=stack)


def test_a_word_that_torchao_lacks_is_one_readable_error() -> None:
    text = export("bf16_with_fp8_rowwise", "fsdp2").pieces[0].text
    with pytest.raises(BadValue, match=r"from_recipe_name\('other'\): expected tensorwise, rowwise"):
        read_python(text.replace('"rowwise"', '"other"'), None)


ODD = {
    "no policy": "fully_shard(model)",
    "a policy that is none": "fully_shard(1, mp_policy=3)",
    "a dtype that is none": "model.to(torch.nonsense)\nfully_shard(model)",
    "a filter of words": "def quantized(m, n):\n    return 'a' <= int(n) < depth - 'b'\nFloat8LinearConfig.from_recipe_name('rowwise')\nfully_shard(m)",
    "a list for a word": "from accelerate import Accelerator\nAccelerator(mixed_precision=[1])",
    "a word of nobody": "from accelerate import Accelerator, FullyShardedDataParallelPlugin\nFullyShardedDataParallelPlugin()\nAccelerator(mixed_precision='fp4')",
    "a scale that is none": "ShardedGradScaler(init_scale='x', growth_interval=[])\nfully_shard(m)",
    "an object for a number": "FusedAdam(master_weights=object(), exp_avg_dtype=3)\nfully_shard(m)",
    "objects all over": "import lightning\nTrainer(strategy=Strategy(), plugins=[1, Plugin(), None], precision=Word())",
    "numbers all over": "import transformers\nTrainingArguments(bf16=3, fp16=[], dtype=4)",
    "a long sum": "x = " + "+".join("1" * 3000) + "\nfully_shard(model)",
    "a long chain": "x = a" + ".b" * 3000 + "\nfully_shard(model)",
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_an_odd_set_up_ends_in_an_answer_or_in_our_own_error(text: str) -> None:
    with contextlib.suppress(BadValue, DataError):
        assert read_python(text, None).meaning.storage


def test_a_word_that_an_argument_of_the_script_gives_is_no_bf16() -> None:
    text = (
        export("bf16_mixed", "accelerate").pieces[0].text.replace('mixed_precision="bf16"', "mixed_precision=args.mp")
    )
    found = read_python(text, None)
    assert any("mixed_precision = args.mp" in line for line in found.assumed)
