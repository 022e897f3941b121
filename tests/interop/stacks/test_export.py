"""Exports: goldens of every recipe and stack, the class of each, and what a stack cannot say."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from mpbridge import ConfigContainer, MixedPrecisionConfig, recipes
from mpbridge.common.errors import BadValue, UnknownName
from mpbridge.interop.stacks.exporters import STACKS, export
from mpbridge.interop.stacks.importers import read_args
from mpbridge.interop.stacks.meaning import of_policy
from mpbridge.interop.stacks.megatron_lm_arguments import options
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parents[2] / "golden" / "exports"


def as_text(stack: str) -> str:
    """Every recipe of one stack, as the golden file holds it."""
    parts = []
    for name in recipes:
        made = export(name, stack)
        pieces = "\n".join(f"-- {piece.name}\n{piece.text}" for piece in made.pieces)
        lines = "\n".join(f"   {line}" for line in made.lines)
        parts.append(f"## {name}: {made.fidelity}\n{pieces}\n{lines}".rstrip())
    return "\n\n".join(parts) + "\n"


@pytest.mark.parametrize("stack", STACKS)
def test_every_export_is_as_the_golden_file_says(stack: str) -> None:
    path = GOLDEN / f"{stack}.txt"
    if os.environ.get("MPBRIDGE_WRITE_GOLDENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(as_text(stack))
    assert as_text(stack) == path.read_text(), "MPBRIDGE_WRITE_GOLDENS=1 writes it anew"


# the published comparison of stacks, recipe by recipe: E exact, A approximate, - not at all; rows that differ are explained below
COVERAGE = {
    # published as E for DeepSpeed; live tensors show that ZeRO updates a copy of FP32 parameters too
    "fp32": "E E E E E . . A",
    "bf16_mixed": "E E A A A A A E",
    "fp16_mixed": "E E A - A A A E",
    "bf16_with_fp8_delayed_scaling_mixed": "E E - - - A A -",
    "bf16_with_mxfp8_mixed": "E E A A A A - -",
    "bf16_with_fp8_current_scaling_mixed": "E E A - A A - -",
    "bf16_with_fp8_subchannel_scaling_mixed": "E E A - - - - -",
    "bf16_with_nvfp4_mixed": "E . - A - - - -",
    "bf16_params_fp32_states": "A A E A E A A .",
    # published as A for accelerate, for its autocast; live tensors show none over FSDP2 (scripts/evidence/witness_stacks.py)
    "fp32_params_bf16_compute": "A A E E E E A A",
    "full_bf16": "- - E A E . E E",
    "bf16_mixed_bf16_moments": "E A A A A A A .",
}


@pytest.mark.parametrize(("recipe", "row"), COVERAGE.items(), ids=COVERAGE)
def test_the_class_of_an_export_is_the_published_one(recipe: str, row: str) -> None:
    letters = {"exact": "E", "layout": "A", "different": "A", "impossible": "-"}
    for stack, expected in zip(STACKS, row.split(), strict=False):
        if expected != ".":
            assert (stack, letters[export(recipe, stack).fidelity]) == (stack, expected)


_STATE, _WRAPPED = "fp32 fp16 bf16 fp8", "fp32 bf16 fp16 auto"
CHOICES = {
    "--main-grads-dtype": "fp32 bf16", "--main-params-dtype": "fp32 fp16", "--exp-avg-dtype": _STATE, "--exp-avg-sq-dtype": _STATE,
    "--output-logit-dtype": "bf16 fp32", "--moe-router-dtype": "fp32 fp64", "--optimizer": "adam sgd muon dist_muon",
    **{f"--megatron-fsdp-{name}-dtype": _WRAPPED for name in ("main-params", "main-grads", "grad-comm")},
}  # fmt: skip
"""The values that its parser takes (training/arguments.py of core_v0.16.1 and d98e8a64)."""


def test_what_the_parser_refuses_is_said_to_be_lost() -> None:
    made = export(MixedPrecisionConfig(fp16=True, logit_dtype="fp16"), "megatron-lm")
    assert "logit" not in made.pieces[0].text
    assert [line.text for line in made.lines if line.fact == "logit_dtype"] == [
        "fp16 here, the model's own there: the flag exists from core 0.20 on, for bf16 and fp32"
    ]


@pytest.mark.parametrize("version", ["0.16", "0.20"])
def test_every_flag_written_for_a_version_is_one_of_its_parsers_and_is_read_back(version: str) -> None:
    states: dict[str, object] = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "fp8"}
    configs = [get_mixed_precision_config(name) for name in recipes]
    configs += [
        MixedPrecisionConfig(bf16=True, fp4="e2m1", fp4_recipe="nvfp4", fp4_param=True, logit_dtype="fp32"),
        MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=False, grad_accumulation_dtype="fp32", **states),
        MixedPrecisionConfig(
            fp16=True, grad_reduce_in_fp32=False, main_grads_dtype="fp16", logit_dtype="fp16", **states
        ),
        MixedPrecisionConfig(fp16=True, grad_reduce_in_fp32=False, main_params_dtype="fp16", exp_avg_sq_dtype="fp16"),
    ]
    for config in configs:
        for engine in ("mcore", "megatron_fsdp"):
            text = export(config, "megatron-lm", version=version, engine=engine).pieces[0].text.replace("\\\n", " ")
            flags = {word for word in shlex.split(text) if word.startswith("--")}
            assert flags <= options(version).keys()
            for option, value in re.findall(r"(--\S+-dtype|--optimizer) (\S+)", text):
                assert value in CHOICES[option].split(), (option, value)
            assert not read_args(text, version=version).unknown
    later = options("0.20").keys() - options("0.16").keys()
    assert {"--megatron-fsdp-grad-comm-dtype", "--output-logit-dtype"} <= later


def test_flags_of_a_later_version_are_unknown_to_an_earlier_one() -> None:
    found = read_args("--bf16 --use-megatron-fsdp --megatron-fsdp-grad-comm-dtype bf16", version="0.16")
    assert found.unknown
    # its Megatron-FSDP reads the flag that the later one passes over
    assert found.meaning.wire.short == "fp32"
    assert read_args("--bf16 --use-megatron-fsdp", version="0.20").meaning.wire.short == "bf16"


@pytest.mark.parametrize("stack", ["fsdp2", "accelerate", "lightning", "transformers", "torchtitan"])
def test_python_that_is_exported_compiles(stack: str) -> None:
    for piece in (piece for name in recipes for piece in export(name, stack).pieces):
        if piece.name in ("python", "config_registry.py"):
            compile(piece.text, stack, "exec")


FP8 = {"bf16": True, "fp8": "e4m3", "fp8_recipe": "delayed"}
APART = {"bf16": True, "grad_reduce_in_fp32": False, "grad_accumulation_dtype": "fp32"}
CAST = {"bf16": True, "params_dtype": "fp32", "main_params_dtype": "fp32", "autocast_enabled": True}
OWN = {"fp8": "e4m3", "fp8_recipe": "tensorwise", "fp8_options": {"power_of_two": True}}
SOFTMAX = {"bf16": True, "attention_softmax_in_fp32": False}
ROWS: list[tuple[Any, ...]] = [
    # (recipe or fields, stack, what holds ...): 'text: a' (in the pieces; '!': not), 'fidelity=', 'lost=facts that are impossible', 'line: fact & words' ('!': none), 'wire=' (a fact of the meaning)
    ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_dot_product_attention": True, "autocast_enabled": True, "keep_fp32": ("*norm*",), "output_dtype": "fp32"}, "megatron-lm",
     # stages send what modules hand on, FP32 here
     "fidelity=impossible", "lost=autocast_enabled, fp8_dot_product_attention, keep_fp32, output_dtype, pipeline_dtype", "!text: fp8-dot"),
    ("bf16_megatron_fsdp", "megatron-lm", "text: --megatron-fsdp-main-params-dtype fp32", "text: --megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype fp32"),
    ("bf16_mixed", "automodel", "text: _target_: torch.distributed.fsdp.MixedPrecisionPolicy", "text: param_dtype", "text: reduce_dtype", "text: output_dtype", "text: cast_forward_inputs"),
    ("bf16_with_nvfp4_mixed", "torchtitan", 'text: fqns=["attention", "feed_forward", "moe.shared_experts.w"]', "!text: --nvfp4"),
    ("bf16_mixed", "lightning", "text: reduce_dtype=torch.float32"),
    ("fp16_mixed", "deepspeed", 'text: "initial_scale_power": 32'),
    ("bf16_mixed", "deepspeed", 'text: "communication_data_type": "fp32"'),
    *(({"fp16": True, "initial_loss_scale": 65536, **said}, "deepspeed", f'text: "loss_scale_window": {window},', 'text: "min_loss_scale": 1\n', f"{no}line: loss_scale")
      for said, window, no in (({"loss_scale_window": 1000.6}, 1001, ""), ({"min_loss_scale": 0.25}, 1000, ""), ({}, 1000, "!"))),
    (FP8 | {"fp8_amax_history_len": 16, "fp8_amax_compute_algo": "most_recent"}, "accelerate", "quantization~e4m3, delayed scaling, amax history 16 (max)", "line: quantization & different"),
    ("bf16_with_fp8_delayed_scaling_mixed", "lightning", "text: weights_dtype=torch.float32,\n        fallback_compute_dtype=torch.bfloat16", "storage=fp32", "wire=fp32", "sharded=nothing"),
    (FP8 | {"fp8_amax_compute_algo": "most_recent", "fp8_dot_product_attention": True}, "lightning", 'text: "fp8_format": "E4M3"', 'text: "amax_compute_algo": "most_recent"', 'text: "fp8_dpa": True'),
    *((APART, stack, "line: accumulator", "fidelity=different") for stack in ("megatron-lm", "megatron-bridge")),
    (APART, "deepspeed", 'text: "communication_data_type": "bf16"', 'text: "grad_accum_dtype": "fp32"'),
    ("bf16_mixed", "megatron-lm", "text: --attention-softmax-in-fp32", "text: --use-distributed-optimizer"),
    (SOFTMAX, "megatron-lm", "!text: --attention-softmax-in-fp32"),
    (SOFTMAX, "megatron-bridge", "text: attention_softmax_in_fp32: false"),
    ("fp16_mixed", "megatron-bridge", "text: initial_loss_scale: 4294967296", "text: min_loss_scale: 1.0", "text: loss_scale_window: 1000", "text: attention_softmax_in_fp32: true"),
    ("nemotron_3_super_bf16_with_nvfp4_mixed", "megatron-bridge", "text: num_layers_at_start_in_bf16: 0\n  num_layers_at_end_in_bf16: 14"),
    ({"bf16": True, "fp4": "e2m1", "fp4_options": {"stochastic_rounding": False}}, "megatron-lm", "text: \nexport NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1\n"),
    ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise", "modules": {"mlp.*": OWN}}, "megatron-lm", "line: power_of_two", "fidelity=different"),
    ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_options": {"power_of_two": True}, "modules": {"mlp.*": OWN}}, "megatron-lm", "fidelity=exact"),
    *(("bf16_with_fp8_rowwise", stack, "fidelity=impossible", "!text: rowwise") for stack in ("megatron-lm", "megatron-bridge")),
    *((CAST, stack, "fidelity=exact") for stack in ("fsdp2", "accelerate", "lightning", "transformers")),
    (CAST, "deepspeed", 'text: "torch_autocast": {\n    "enabled": true,\n    "dtype": "bfloat16"', "line: wire & different", "!line: autocast_enabled"),
    (CAST | {"grad_reduce_in_fp32": False}, "deepspeed", "fidelity=layout"),  # ZeRO updates a copy of the FP32 parameters
    (CAST | {"grad_reduce_in_fp32": False}, "accelerate", "fidelity=different"),
    ({"bf16": True, "output_dtype": "fp32", "pipeline_dtype": "fp32"}, "megatron-bridge", "text: pipeline_dtype:\n    _target_: torch.float32", "lost=output_dtype"),
    *((name, "torchtitan", "fidelity=impossible", "!text:  float16", "compute=bf16") for name in ("fp16_mixed", "fp16_with_mxfp8_mixed")),
    ({"bf16": True, "moe_router_dtype": "fp32"}, "automodel", "!line: moe_router_dtype", "text: gate_precision: float32", "!text: te_fp8"),
    ({"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8", "moe_router_dtype": "fp32"}, "automodel", "!line: moe_router_dtype", "text: gate_precision: float32", "text: te_fp8"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[1]} {row[0]}"[:80])
def test_an_export_writes_and_says(row: tuple[Any, ...]) -> None:
    recipe, stack, *claims = row
    made = export(MixedPrecisionConfig(**recipe) if isinstance(recipe, dict) else recipe, stack)
    text = "\n" + "\n".join(piece.text for piece in made.pieces) + "\n"
    lines = [f"{line.fact}: {line.fidelity}: {line.text}" for line in made.lines]

    def holds(claim: str) -> bool:
        kind, colon, words = claim.lstrip("!").partition(": ")
        if colon and kind in ("text", "line"):
            found = words in text if kind == "text" else any(line.startswith(f"{words.split(' & ')[0]}:") and all(word in line for word in words.split(" & ")) for line in lines)  # fmt: skip
            return found is not claim.startswith("!")
        path, _, wanted = claim.replace("~", "=", 1).partition("=")
        if path == "lost":
            return wanted == ", ".join(sorted({line.fact for line in made.lines if line.fidelity == "impossible"}))
        value = made.fidelity if path == "fidelity" else getattr(made.meaning, path)
        value = getattr(value, "short", value)
        return wanted in value if "~" in claim else bool(wanted == value)

    assert [claim for claim in claims if not holds(claim)] == [], (text, lines)


def test_rules_by_module_are_named_where_a_stack_has_none() -> None:
    low = {"fp8": "e4m3", "fp8_recipe": "mxfp8", "modules": {"mlp.linear_fc2": "bf16"}}
    config = MixedPrecisionConfig(bf16=True, fp32_residual_connection=True, **low)
    for stack in STACKS:
        made = export(config, stack)
        impossible = {line.fact for line in made.lines if line.fidelity == "impossible"}
        assert ("modules" in impossible) is (stack != "megatron-lm"), stack
        # FSDP casts under Lightning's autocast; transformers' DDP casts operations alone
        residual = stack not in ("megatron-lm", "megatron-bridge", "transformers")
        assert ("fp32_residual_connection" in impossible) is residual, stack


@pytest.mark.parametrize("stack", ["fsdp2", "accelerate"])
def test_layers_at_the_ends_are_left_out_by_code_and_not_by_a_comment(stack: str) -> None:
    import torch

    lines = export("nemotron_h_bf16_with_fp8_current_scaling_mixed", stack).pieces[0].text.splitlines()
    names: dict[str, Any] = {"depth": 12, "torch": torch}
    start = next(at for at, line in enumerate(lines) if line.startswith("def quantized"))
    exec("\n".join(lines[start : start + 4]), names)
    linear, ask = torch.nn.Linear(1, 1), names["quantized"]
    kept = [n for n in range(12) if not ask(linear, f"model.layers.{n}.mlp.up")]
    assert kept == [0, 1, 10, 11]
    assert not ask(linear, "lm_head")
    assert not ask(torch.nn.LayerNorm(1), "model.layers.5.norm")


def test_automodel_names_the_last_layers_where_the_depth_is_known() -> None:
    name = "nemotron_h_bf16_with_fp8_current_scaling_mixed"
    assert any(line.fact == "edge layers" for line in export(name, "automodel").lines)
    made = export(name, "automodel", run=container(name, layers=12).resolved(1, training=False))
    left_out = yaml.safe_load(made.pieces[0].text)["fp8"]["filter_fqns"]
    assert left_out == ["lm_head", *(f"layers.{number}." for number in (0, 1, 10, 11))]
    assert not any(line.fact == "edge layers" for line in made.lines)


def container(recipe: str, *, layers: int, **more: Any) -> ConfigContainer:
    model = {"num_layers": layers, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128} | more
    optimizer = {"lr": 1e-3, "use_distributed_optimizer": True}
    return ConfigContainer(
        mixed_precision={"recipe": recipe}, model=model, optimizer=optimizer, ddp={"use_distributed_optimizer": True}, data={"seq_length": 32}
    )  # fmt: skip


def test_an_unknown_stack_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="nearest: torchtitan"):
        export("bf16_mixed", "torchtitn")
    with pytest.raises(BadValue, match="the version of deepspeed is empty"):
        export("bf16_mixed", "deepspeed", version=" ")


@pytest.mark.parametrize(
    ("stack", "asked", "written"),
    [
        ("deepspeed", "0.12", "0.19"), ("deepspeed", "0.19.9", "0.19"), ("megatron-lm", "0.18.1", "0.16"), ("megatron-lm", "v0.21.0rc1", "0.20"),
        ("megatron-lm", "0.9", "0.16"), ("megatron-lm", "dev", "0.20"), ("torchtitan", "0.3", "main"),
    ],
)  # fmt: skip
def test_for_a_version_that_nobody_read_the_nearest_one_is_written_and_said(stack, asked, written, cli) -> None:
    made, as_read = export("bf16_mixed", stack, version=asked), export("bf16_mixed", stack, version=written)
    assert (made.version, made.pieces, made.lines) == (written, as_read.pieces, as_read.lines)
    assert [f"{asked} is not supported" in text and f"written as {written}," in text for text in made.assumed] == [True]
    assert made.assumed[0] in cli("export", "bf16_mixed", "--to", stack, "--stack-version", asked)


def test_a_version_that_was_read_is_known_by_each_of_its_names() -> None:
    known = {"deepspeed": "0.19.8", "megatron-lm": "core_v0.16", "megatron-bridge": "main", "fsdp2": "2.13"}
    assert [export("bf16_mixed", stack, version=asked).assumed for stack, asked in known.items()] == [()] * 4


@pytest.mark.parametrize("stack", STACKS)
def test_rules_that_name_the_linears_of_another_model_can_be_said_nowhere(stack: str, file) -> None:
    rule = "{fp8: hybrid, fp8_recipe: tensorwise}"
    files = {
        "hf": f"extends: bf16_mixed\nmodules:\n  '*layers.0.self_attn.q_proj': {rule}\n",
        # a name that megatron-core has too, chosen for another model's linear
        "alike": f"extends: bf16_mixed\nmodules:\n  '*linear_fc1': {rule}\nevidence: {{names of another model: Net}}\n",
        # what extends it has its rules, and so its model's names
        "child": "extends: alike.yaml\ngrad_reduce_in_fp32: false\n",
    }
    for name, text in files.items():
        made = export(str(file(f"{name}.yaml", text)), stack)
        assert made.fidelity == "impossible", name
        assert "precision.yaml" not in "".join(piece.name + piece.text for piece in made.pieces)
        if stack.startswith("megatron"):
            assert any("names of another model" in line.text for line in made.lines if line.fact == "modules"), name


def test_an_accumulator_apart_from_the_wire_is_said_where_a_stack_has_both() -> None:
    config = MixedPrecisionConfig(**APART)
    lm, bridge = (export(config, stack, engine="megatron_fsdp") for stack in ("megatron-lm", "megatron-bridge"))
    assert lm.fidelity == bridge.fidelity == "exact"
    text = lm.pieces[0].text
    assert "--megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype bf16" in text
    assert read_args(text.replace("\\\n", " "), stack="megatron-lm").fields["grad_accumulation_dtype"] == "fp32"


def test_a_run_is_exported_with_its_additions_engine_and_optimizer() -> None:
    added = container("bf16_mixed", layers=2)
    added.mixed_precision["grad_reduce_in_fp32"] = False  # type: ignore[index]
    made = export("bf16_mixed", "megatron-lm", run=added.resolved(1, training=False))
    assert made.pieces[0].text.split(" \\\n") == [
        "--bf16", "--grad-reduce-in-bf16", "--attention-softmax-in-fp32", "--use-distributed-optimizer",
    ]  # fmt: skip


def test_what_the_model_section_says_is_exported_with_the_run() -> None:
    said = {"fp32_residual_connection": True, "moe_router_dtype": "fp32", "num_moe_experts": 4}
    run = container("bf16_mixed", layers=4, **said).resolved(1, training=False)
    text = export("bf16_mixed", "megatron-lm", run=run).pieces[0].text
    assert "--fp32-residual-connection" in text
    assert "--moe-router-dtype fp32" in text
    model = yaml.safe_load(export("bf16_mixed", "megatron-bridge", run=run).pieces[0].text)["model"]
    assert (model["fp32_residual_connection"], model["moe_router_dtype"]) == (True, "fp32")
    assert "fp32_residual_connection" in {line.fact for line in export("bf16_mixed", "torchtitan", run=run).lines}
    # the recipe alone says nothing of them
    assert "residual" not in export("bf16_mixed", "megatron-lm").pieces[0].text


def test_who_divides_the_states_is_written_for_megatron_lm() -> None:
    alone = export("bf16_mixed", "megatron-lm")
    assert "--use-distributed-optimizer" in alone.pieces[0].text
    read = read_args(alone.pieces[0].text.replace("\\\n", " "))
    ours = of_policy(resolve(get_mixed_precision_config("bf16_mixed")))
    assert read.meaning.bytes == alone.meaning.bytes == ours.bytes
    whole = container("bf16_mixed", layers=4)
    whole.ddp = {}  # type: ignore[assignment]
    whole.optimizer = {"lr": 1e-3}  # type: ignore[assignment]
    made = export("bf16_mixed", "megatron-lm", run=whole.resolved(1, training=False))
    assert "distributed" not in made.pieces[0].text
    assert (made.fidelity, made.meaning.bytes) == ("exact", (18, 0))


def test_a_narrow_copy_of_the_weights_is_nowhere_called_what_the_parameters_are() -> None:
    narrow = {"use_precision_aware_optimizer": True, "store_param_remainders": False, "main_params_dtype": "fp16"}
    config = MixedPrecisionConfig(bf16=True, **narrow)
    for stack in STACKS:
        made = export(config, stack)
        if stack.startswith("megatron"):
            assert made.meaning.main is not None
            assert made.meaning.main.short == "fp16"
            continue
        assert made.meaning.master.short == "fp32", stack
        assert made.meaning.compute.short == "bf16", stack
        assert any(line.fact == "main" and line.fidelity == "different" for line in made.lines), stack
    own = export("full_bf16", "megatron-lm")
    assert own.meaning.main is not None, "--bf16 always makes FP32 main weights"
    assert {"main", "exp_avg", "exp_avg_sq"} <= {line.fact for line in own.lines}


@pytest.mark.parametrize(
    ("recipe", "stack"), [("bf16_with_nvfp4_mixed", "torchtitan"), ("bf16_with_fp8_rowwise_gw_hp", "torchtitan"), ("bf16_with_fp8_rowwise", "fsdp2")]
)  # fmt: skip
def test_experts_that_a_stack_leaves_as_they_are_make_no_exact_export(recipe: str, stack: str) -> None:
    made = export(recipe, stack, run=container(recipe, layers=2, num_moe_experts=4).resolved(1, training=False))
    assert made.fidelity in ("different", "impossible")
    assert any(line.fact == "experts" and "in BF16 there" in line.text for line in made.lines)
    dense = export(recipe, stack, run=container(recipe, layers=2).resolved(1, training=False))
    assert not any(line.fact == "experts" for line in dense.lines)
    assert dense.assumed == ()


GIVEN_LAYER = ("attention.qkv_linear.wq", "feed_forward.w1", "moe.shared_experts.w2")
LEFT = ("layers.1.moe.router.gate", "layers.1.moe.shared_experts.gate", "lm_head")
"""Names of torchtitan's linears: those of a layer that recipes quantize, and those that none does."""


@pytest.mark.parametrize("recipe", ["bf16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed", "bf16_with_fp8_rowwise"])
@pytest.mark.parametrize("ends", [None, (1, 2)])
def test_torchtitans_converters_choose_the_linears_and_experts_that_a_recipe_quantizes(recipe: str, ends: Any) -> None:
    config = get_mixed_precision_config(recipe)
    if ends is not None:
        edges = {"num_layers_at_start_in_bf16": ends[0], "num_layers_at_end_in_bf16": ends[1]}
        config = config.derive(first_last_layers_bf16=True, **edges)
    text = next(piece.text for piece in export(config, "torchtitan").pieces if piece.name == "config_registry.py")
    calls: dict[str, dict[str, Any]] = {}

    class Converter:
        def __init__(self, name: str) -> None:
            self.Config = lambda **said: calls.setdefault(name, said)

    layers, names = [None] * 12, re.findall(r"\w+Converter", text.splitlines()[1])
    scope: dict[str, Any] = {name: Converter(name) for name in names}
    exec(text.split("\n", 2)[2], scope)  # our own text, with stand-ins for the classes that it imports
    spec = SimpleNamespace(model=SimpleNamespace(layers=layers))
    run = SimpleNamespace(model_spec=spec, compile=SimpleNamespace(enable=True))
    scope["quantized"](run, lambda flavor, converters: None, "8B")
    linear = next(said for name, said in calls.items() if "Linear" in name)
    kept = linear.get("filter_fqns", [])

    def converted(name: str) -> bool:  # as its converters choose, by substring
        covered = "fqns" not in linear or any(part in name for part in linear["fqns"])
        small = name == LEFT[1] and "fqns" not in linear  # its float8 converter leaves what 16 does not divide
        return covered and not small and not any(part in name for part in kept)

    first, last = ends or (0, 0)
    for layer in range(12):
        inside = first <= layer < 12 - last
        assert all(converted(f"layers.{layer}.{name}") is inside for name in GIVEN_LAYER), layer
    assert not any(map(converted, LEFT))
    assert ("GroupedExpertsConverter" in "".join(calls)) is (recipe != "bf16_with_nvfp4_mixed")


def test_experts_that_torchtitan_quantizes_as_the_recipe_does_need_no_line() -> None:
    for recipe in ("bf16_with_mxfp8_mixed", "bf16_with_fp8_rowwise"):
        mixture = container(recipe, layers=2, num_moe_experts=4).resolved(1, training=False)
        made = export(recipe, "torchtitan", run=mixture)
        assert not any(line.fact == "experts" for line in made.lines)
        assert made.assumed == export(recipe, "torchtitan").assumed == ()
    config = get_mixed_precision_config("bf16_with_fp8_rowwise").derive(first_last_layers_bf16=True)
    said = "in every layer there: Float8GroupedExpertsConverter"
    assert any(said in line for line in export(config, "torchtitan").assumed)


@pytest.mark.parametrize("stack", ["megatron-lm", "megatron-bridge"])
def test_the_softmax_that_query_key_layer_scaling_switches_on_is_exported(stack: str) -> None:
    said = {"attention_softmax_in_fp32": False, "apply_query_key_layer_scaling": True}
    scaled = container("bf16_mixed", layers=2, **said)
    made = export("bf16_mixed", stack, run=scaled.resolved(1, training=False))
    assert made.meaning.softmax_fp32 is True
    assert "attention_softmax_in_fp32: false" not in made.pieces[0].text
    assert stack != "megatron-lm" or "--attention-softmax-in-fp32" in made.pieces[0].text


@pytest.mark.parametrize("stack", ["torchtitan", "fsdp2"])
def test_an_export_without_a_run_says_that_it_is_for_dense_models(stack: str, cli) -> None:
    printed = cli("export", "bf16_with_fp8_rowwise_gw_hp", "--to", stack)
    told = printed[printed.index("# bf16_with_fp8_rowwise_gw_hp on ") :].splitlines()
    assert all(line.startswith("# ") for line in told), "what is printed can be saved as it is"
    shown = " ".join(printed.split())
    assert ": exact, given what is assumed below" in shown
    assert "a dense model; the experts of a mixture are quantized here, in BF16 there: " in shown
    assert export("bf16_mixed", stack).assumed == ()


def test_a_runs_own_precision_is_exported_and_one_that_a_recipe_replaces_is_named(file, cli) -> None:
    stated = "mixed_precision: {bf16: true, grad_reduce_in_fp32: false}"
    text = re.sub(r"(?m)^mixed_precision:.*$", stated, (ROOT / "configs" / "gpt_tiny.yaml").read_text())
    assert stated in text
    to = ("--to", "megatron-lm", "--config", file("run.yaml", text))
    assert "--grad-reduce-in-bf16" in cli("export", *to)
    assert "bf16_mixed replaces the mixed_precision of" in cli("export", "bf16_mixed", *to, joined=True)
    cli("export", "--to", "megatron-lm", code=2)
