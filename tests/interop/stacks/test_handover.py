"""Whether a checkpoint can be continued elsewhere, and a recipe file that keeps the engine of what was imported."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from mpbridge import MixedPrecisionConfig, resolve
from mpbridge.common.errors import RecipeError
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.exporters import STACKS
from mpbridge.interop.stacks.importers import read_args, read_file
from mpbridge.interop.stacks.meaning import of_policy
from mpbridge.interop.stacks.reasons import ALONE, OURS, Setup, handover
from mpbridge.precision.registry import describe, get_mixed_precision_config

MEGATRON = {"megatron-lm", "megatron-bridge"}


def side(stack: str = OURS, engine: str = DEFAULT, recipe: str = "bf16_mixed") -> Setup:
    meaning = of_policy(resolve(get_mixed_precision_config(recipe)), engine=engine)
    return Setup(meaning=meaning, stack=stack, engine=engine)


def test_equal_dtypes_never_carry_a_checkpoint_into_another_format() -> None:
    for a, b in itertools.product((OURS, *STACKS), repeat=2):
        said = handover(side(a), side(b))
        assert said.startswith("They mean the same. ")
        if a == b:
            assert ("can be continued in B unchanged" in said) is (a == OURS), a
            assert ("its own loader decides" in said) is (a != OURS), a
        elif {a, b} == MEGATRON:
            assert "not verified" in said
        else:
            assert "A's checkpoints cannot be continued in B." in said, (a, b)
            assert ALONE in said, (a, b)


def test_a_folder_of_megatron_gives_its_weights_here_without_a_detour() -> None:
    assert "--reset-optimizer" in handover(side("megatron-lm"), side())
    assert "mpbridge convert hf:DIR ckpt:DIR" in handover(side("megatron-lm"), side(engine="fsdp2"))
    assert "AutoBridge.import_ckpt" in handover(side(), side("megatron-bridge"))


def test_engines_of_other_forms_do_not_read_each_other_and_lost_bits_are_named() -> None:
    assert "Checkpoints of engine mcore cannot be continued with engine fsdp2" in handover(side(), side(engine="fsdp2"))
    assert "resume-check" in handover(side(), side(recipe="bf16_mixed_bf16_moments"))
    assert "they are rounded" in handover(side(), side(recipe="full_bf16"))
    assert "rounded" not in handover(side(recipe="full_bf16"), side())


def test_compare_says_so_for_files(file, cli) -> None:
    path = file("ds.json", '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}, "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}')  # fmt: skip
    assert "They mean the same. A's checkpoints cannot be continued in B." in cli("compare", "bf16_mixed", path)


def test_facts_of_the_model_are_rows_where_one_side_states_them(file, cli) -> None:
    path = file("mine.yaml", "extends: bf16_mixed\nfp32_residual_connection: true\nkeep_fp32: ['*norm*']\n")
    shown = cli("compare", "bf16_mixed", path)
    assert all(word in shown for word in ("residual stream in FP32", "*norm*", "They compute differently"))


WRITTEN = {
    "torchtitan": ["--from=torchtitan", "--args=--training.dtype bfloat16"],
    "bf16 gradients": ["--args=--bf16 --grad-reduce-in-bf16"],
    "fp8 moments": ["--args=--bf16 --use-precision-aware-optimizer --use-distributed-optimizer --exp-avg-dtype fp8"],
    "loss scale": ["--args=--fp16 --initial-loss-scale 65536 --hysteresis 3"],
    "engine": ["--args=--bf16 --use-megatron-fsdp --megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype bf16 --init-model-with-meta-device"],
    "model facts": ["--args=--bf16 --moe-router-dtype fp32 --fp32-residual-connection"],
    **{file.name: [str(file)] for file in (Path(__file__).parents[3] / "docs/stacks/examples").iterdir()},
}  # fmt: skip


@pytest.mark.parametrize("words", WRITTEN.values(), ids=WRITTEN)
def test_a_written_recipe_means_what_was_imported(words: list[str], tmp_path: Path, cli) -> None:
    written = tmp_path / "mine.yaml"
    cli("import", *words, "--write", written, code=(0, 1))  # 1: something of it is named as lost
    if words[0].startswith("--"):
        found = read_args(words[-1].partition("=")[2], stack="torchtitan" if len(words) > 1 else "megatron-lm")
    else:
        found = read_file(Path(words[0]))
    assert (found.engine == "megatron_fsdp") is ("--use-megatron-fsdp" in words[-1])
    mine, wanted = get_mixed_precision_config(str(written)), MixedPrecisionConfig.from_data(found.fields)
    # settled: a fact that a recipe leaves open is FP32 or off, as the file states it
    assert resolve(mine).settled() == resolve(wanted).settled()
    assert (describe(str(written)).engine or DEFAULT) == found.engine


def test_a_recipe_file_states_its_engine_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    base, more = tmp_path / "base.yaml", tmp_path / "more.yaml"
    base.write_text("extends: bf16_mixed\nengine: megatron_fsdp\n")
    more.write_text("extends: base.yaml\ngrad_reduce_in_fp32: false\n")
    assert describe(str(more)).engine == "megatron_fsdp"
    assert get_mixed_precision_config(str(base)) == get_mixed_precision_config("bf16_mixed")
    base.write_text("extends: bf16_mixed\nengine: fsdp3\n")
    with pytest.raises(RecipeError, match=r"fsdp3.*nearest: fsdp2"):
        get_mixed_precision_config(str(base))


def test_compare_reads_every_file_that_is_a_recipe_and_names_what_reads_the_others(file, cli) -> None:
    text = "extends: bf16_mixed\ngrad_reduce_in_fp32: false\nengine: mcore\nevidence: {model: tiny}\n"
    assert "gradients on the wire" in cli("compare", file("tuned.yaml", text), "bf16_mixed").partition("alike")[0]
    wrong = {"extends: bf16_mixed\ngrad_reduce_in_fp31: false\n": "grad_reduce_in_fp32", "color: red\n": "mpbridge import FILE --from STACK"}  # fmt: skip
    for text, said in wrong.items():
        assert said in cli("compare", file("tuned.yaml", text), "bf16_mixed", code=2)


def test_compare_says_what_only_one_file_has_beyond_its_meaning(file, cli) -> None:
    base = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3%s}}'
    plain, other = file("a.json", base % ""), file("b.json", base % ', "zero_quantized_gradients": true')
    shown = cli("compare", plain, other)
    assert "They mean the same" not in shown
    assert "not all of it: B has" in " ".join(shown.split())
    assert f"{other}, mpbridge cannot express:" in shown
    assert "They mean the same" in cli("compare", plain, plain)
    assert json.loads(cli("compare", plain, other, "--json"))["notes"]["b"]["cannot_express"]


def test_compare_reads_a_stacks_file_for_the_version_that_is_asked(file, cli) -> None:
    script = file("run.sh", "torchrun pretrain_gpt.py --bf16 --use-megatron-fsdp --use-distributed-optimizer\n")
    for version, sharded in (("0.16", "nothing"), ("0.20", "everything")):
        rows = [line.split() for line in cli("compare", "full_bf16", script, "--stack-version", version).splitlines()]
        assert any(row[:2] == ["sharded", "over"] and sharded in row for row in rows)
    assert "megatron-lm 0.9 is not supported" in cli("compare", script, "bf16_mixed", "--stack-version", "0.9", joined=True)  # fmt: skip
    assert "ds.json: no such file" in cli("compare", "bf16_mixed", script.with_name("ds.json"), code=2)
    assert "neither A nor B" in cli("compare", "bf16_mixed", "full_bf16", "--stack-version", "0.16", code=2)


def test_compare_takes_a_scripts_variables(file, cli) -> None:
    script = file("run.sh", "torchrun pretrain_gpt.py --bf16 --num-layers 2 --fp8-format $F")
    assert "hybrid" in cli("compare", "bf16_mixed", script, "--env", "F=hybrid")
    assert "neither A nor B is one" in cli("compare", "bf16_mixed", "fp16_mixed", "--env", "F=hybrid", code=2, joined=True)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "stack"),
    [
        ("d.json", '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}', None),
        ("c.py", "def c(config):\n    config.training.dtype = 'bfloat16'\n    return config\n", "torchtitan"),
    ],
)
def test_variables_for_a_file_that_has_none_are_named(name: str, text: str, stack: str | None, file) -> None:
    note = "--env X: has no effect: only launch scripts and --args have variables"
    assert note in read_file(file(name, text), stack=stack, env={"X": "1"}).assumed
    assert note not in read_file(file(name, text), stack=stack).assumed
