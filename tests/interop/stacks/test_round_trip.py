"""import(export(x)) = x, for every recipe and stack: what an export means is what the importer says of it. Python is read as text."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from mpbridge import MixedPrecisionConfig, recipes
from mpbridge.common.errors import DataError
from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Export, Imported
from mpbridge.interop.stacks.exporters import STACKS, export
from mpbridge.interop.stacks.importers import read_args, read_file, read_python, read_text
from mpbridge.interop.stacks.meaning import differences
from mpbridge.interop.stacks.nearest import answer
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve

SETS_UP = ("fsdp2", "accelerate", "lightning", "transformers")


def back(one: Export, more: str = "") -> Imported:
    """What the importers make of an export's pieces: torchtitan's arguments hold the dtypes, its Python the quantization. more: arguments of the run beside them."""
    texts = {piece.name: piece.text for piece in one.pieces}
    if one.stack in SETS_UP:
        return read_python(texts["python"], None, stack=one.stack)
    if "arguments" not in texts:
        return read_text(one.pieces[0].text, stack=one.stack, name=one.pieces[0].name)
    # a rules file that the arguments name is written by the script around them, as a here-document
    files = "".join(f"cat > {name} <<'END'\n{text}\nEND\n" for name, text in texts.items() if name == "precision.yaml")
    script = f"{files}torchrun pretrain_gpt.py {texts['arguments']}{more}" if files else ""
    found = read_text(script, name="run.sh") if files else read_args(texts["arguments"].replace("\\\n", " ") + more, stack=one.stack)  # fmt: skip
    if "config_registry.py" not in texts:
        return found
    python = read_python(texts["config_registry.py"], None, stack=one.stack)
    fields = {**found.fields, **python.fields} if found.fields else {}
    meaning = dataclasses.replace(found.meaning, regions=python.meaning.regions)
    return dataclasses.replace(found, fields=fields, meaning=meaning)


# torchtitan's router computes in FP32 whatever its text says, and true is what megatron-core's class has: there is nothing to be read back
UNWRITTEN = {"torchtitan": ("router",), "megatron-bridge": ("softmax_fp32",), "megatron-lm": ("softmax_fp32",)}


@functools.cache
def made(name: str, stack: str) -> tuple[Export, Imported]:
    """A recipe's export, and what is read of it."""
    one = export(name, stack)
    return one, back(one)


def lost(one: Export) -> dict[str, tuple[str, str]]:
    """Facts of an export that its importer does not give back, those that recipes state of the model among them."""
    unwritten = UNWRITTEN.get(one.stack, ())
    # megatron-core's own attention reads the softmax flag, Transformer Engine's does not
    whose = " --transformer-impl local" if one.stack == "megatron-lm" else ""
    apart = differences(one.meaning, back(one, whose).meaning)
    return {row: pair for row, pair in apart.items() if row != "bytes" and (row not in unwritten or "false" in pair)}


@pytest.mark.parametrize("stack", STACKS)
def test_what_was_exported_is_what_is_read_back(stack: str) -> None:
    table = {name: lost(made(name, stack)[0]) for name in recipes}
    assert {name: rows for name, rows in table.items() if rows} == {}


BASES: dict[str, dict[str, Any]] = {
    "megatron's layout": {"bf16": True},
    "torch's layout": {"bf16": True, "params_dtype": "fp32", "main_params_dtype": "fp32"},
    "autocast": {"bf16": True, "params_dtype": "fp32", "main_params_dtype": "fp32", "autocast_enabled": True},
    "fp32": {"fp32": True},
    "autocast around bf16": get_mixed_precision_config("full_bf16").given() | {"autocast_enabled": True},
}
FACTS: dict[str, dict[str, Any]] = {
    **{name: {name: "fp32"} for name in ("output_dtype", "pipeline_dtype", "logit_dtype", "moe_router_dtype")},
    "both": {"output_dtype": "fp32", "pipeline_dtype": "fp32"}, "keep_fp32": {"keep_fp32": ("*norm*",)},
    "fp32_residual_connection": {"fp32_residual_connection": True}, "residual and pipeline": {"fp32_residual_connection": True, "pipeline_dtype": "fp32"},
    "softmax in fp32": {"attention_softmax_in_fp32": True}, "softmax as computed": {"attention_softmax_in_fp32": False},
}  # fmt: skip


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("base", BASES)
def test_a_fact_that_a_recipe_states_is_read_back_where_the_export_claims_it(stack: str, base: str) -> None:
    table = {fact: lost(export(MixedPrecisionConfig(**(BASES[base] | said)), stack)) for fact, said in FACTS.items()}
    assert {fact: rows for fact, rows in table.items() if rows} == {}


@pytest.mark.parametrize("stack", STACKS)
def test_importing_an_exact_export_gives_the_recipe_back(stack: str) -> None:
    exact = {name: both for name in recipes if (both := made(name, stack))[0].fidelity == "exact"}
    assert exact, "a stack that says no recipe exactly would make this test say nothing"
    for name, (one, found) in exact.items():
        told = answer(found.fields, engine=found.engine, meaning=found.meaning)
        # ZeRO 1 is what DeepSpeed's export is written for, and its line about sharding says what reads it back
        divides = any(line.fact == "sharded" and "of the megatron-core engine" in line.text for line in one.lines)
        same = "bf16_mixed" if divides and name == "bf16_megatron_fsdp" else name
        assert told.recipe == same, f"{name} came back from {stack} as {told}"
        assert dict(told.overrides) == {}
        assert not found.contradicts


@pytest.mark.parametrize("stack", ["megatron-lm", "megatron-bridge", "accelerate", "lightning"])
def test_the_margin_of_delayed_scaling_comes_back(stack: str) -> None:
    said = {"fp8_margin": 2, "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"}
    config = get_mixed_precision_config("bf16_with_fp8_delayed_scaling_mixed").derive(**said)
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
def test_a_pasted_export_is_recognized_by_its_comment_and_never_run(stack: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    text = "\n".join(f"    {line}" for line in export("fp32_params_bf16_compute", stack).pieces[0].text.splitlines())
    path.write_text(f"def main():\n{text}\n    open({str(tmp_path / 'RAN')!r}, 'w')\n")
    found = read_file(path)
    assert (found.stack, found.undecided) == (stack, ())
    assert not (tmp_path / "RAN").exists()
    with pytest.raises(DataError, match=f"is for {stack}, not for deepspeed"):
        read_file(path, stack="deepspeed")


def test_an_export_that_was_changed_since_is_undecided(file, cli) -> None:
    text = export("fp32_params_bf16_compute", "fsdp2").pieces[0].text
    other = text.replace("reduce_dtype=torch.float32", "reduce_dtype=args.dtype")
    for changed in (other, text.rpartition("\n")[0], f"{text}\n{text}"):
        assert "undecided" in cli("import", file("train.py", changed), code=1)


@pytest.mark.parametrize("stack", [None, "fsdp2", "megatron-lm"])
def test_python_that_export_did_not_write_is_refused_with_what_to_give(stack: str | None) -> None:
    with pytest.raises(DataError, match=rf"Python script.*{stack or ''}.* would have to be executed: pass its config"):
        read_python("from torch.distributed.fsdp import fully_shard\nfully_shard(model)\n", None, stack=stack)


@pytest.mark.parametrize(
    "comment",
    [
        "{}", "[1]}", '{"code": [1]}', '{"code": "ab"}', '{"code": [1, 2], "storage": "bf16"}', '{"storage": "x", "compute": "bf16"}', '{"code": ' + "[" * 100_000 + "}",
        '{"wire": "fp32", "accumulator": "fp32", "storage": "fp32", "compute": "bf16", "code": [0, 0], "sharded": "most"}',
        '{"wire": "fp32", "accumulator": "fp32", "storage": "fp32", "compute": "bf16", "code": [0, 0], "quant": {"format": "e4m3", "scaling": "x"}}',
        '{"wire": "fp32", "accumulator": "fp32", "storage": "fp32", "compute": "bf16", "code": [0, 0], "loss_scale": {"initial": "x"}}',
        '{"wire": "fp32", "accumulator": "fp32", "storage": "fp32", "compute": "bf16", "code": [0, 0], "regions": []}',
    ],
)  # fmt: skip
def test_a_comment_that_export_did_not_write_is_one_readable_error(comment: str) -> None:
    said = r"the comment `mpbridge export --to fsdp2` in line 1 cannot be read|would have"
    with pytest.raises(DataError, match=said):
        read_python(f"# mpbridge export --to fsdp2: {comment}\n", None)


RULES: dict[str, dict[str, Any]] = {
    "fp8 in bf16": {"modules": {"*mlp.*": "mxfp8"}},
    "bf16 in fp8": {"fp8": "hybrid", "fp8_recipe": "tensorwise", "modules": {"*mlp.linear_fc2": "bf16", "*.linear_qkv": "bf16"}},
    "layers": {"fp8": "e4m3", "fp8_recipe": "mxfp8", "modules": {"mlp.linear_fc2": {"layers": "1-3", "precision": "bf16"}}},
    "two rules of one glob": {"fp8": "e4m3", "fp8_recipe": "mxfp8", "modules": {"mlp.linear_fc1": [{"layers": "1", "precision": "bf16"}, {"layers": "2", "precision": "tensorwise"}]}},
}  # fmt: skip


@pytest.mark.parametrize("said", RULES.values(), ids=RULES)
def test_rules_by_module_come_back_from_the_file_that_the_arguments_name(said: dict[str, Any]) -> None:
    config = MixedPrecisionConfig(bf16=True, **said)
    found = back(export(config, "megatron-lm"))
    assert not found.undecided
    ours, theirs = resolve(config), resolve(MixedPrecisionConfig.from_data(found.fields))
    linears = ("self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
    rules = [[policy.at(name, layer, 6) for name in linears for layer in range(6)] for policy in (ours, theirs)]
    assert [quant and (quant.scaling, quant.format) for quant in rules[0]] == [quant and (quant.scaling, quant.format) for quant in rules[1]]  # fmt: skip


def test_a_rules_file_stands_beside_its_script_or_is_asked_for(tmp_path: Path) -> None:
    one = export("nemotron_3_super_bf16_with_nvfp4_mixed", "megatron-lm")
    texts = {piece.name: piece.text for piece in one.pieces}
    (tmp_path / "run.sh").write_text(f"torchrun pretrain_gpt.py {texts['arguments']}")
    assert any("put it where the script" in line for line in read_file(tmp_path / "run.sh").undecided)
    (tmp_path / "precision.yaml").write_text(texts["precision.yaml"])
    assert not read_file(tmp_path / "run.sh").undecided
    for text in ("3", "{configs: {a: {}}, matchers: {b: {type: glob, enabled: true, pattern: x, config: a}}}", texts["precision.yaml"].replace("glob", "regex")):  # fmt: skip
        (tmp_path / "precision.yaml").write_text(text)
        assert any("precision.yaml" in line for line in read_file(tmp_path / "run.sh").undecided), text
