"""Hardware, engine and hints follow from what a recipe says, wherever it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpbridge.planning.rules.table import broken
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.registry import describe, recipes, register, unregister
from mpbridge.settings.container import ConfigContainer, Run

MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64, "max_sequence_length": 32}


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def resolved(mixed: object, **more: str) -> Run:
    given = {"model": MODEL, "optimizer": {"lr": 1e-3}, "train": {"train_iters": 1}}
    return ConfigContainer(mixed_precision=mixed, **given, **more).resolved()  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "needs", "engine", "hint"), [
    ("extends: fp32_params_bf16_compute\n", None, "fsdp2", None), ("extends: fsdp_fused_adam\n", None, "fsdp2", None),
    ("extends: bf16_megatron_fsdp\nexp_avg_dtype: bf16\n", None, "megatron_fsdp", None),
    ("extends: bf16_mixed\nparams_dtype: fp32\n", None, "fsdp2", None), ("extends: bf16_mixed\n", None, None, None),
    ("extends: mxfp8\n", (10, 0), None, "epsilon"),
    ("bf16: true\nfp8: hybrid\nfp8_recipe: blockwise\nfirst_last_layers_bf16: true\n", (9, 0), None, "edge layers"),
    ("extends: full_bf16\n", None, None, "are lost"),
    ("extends: fp8_mx\nmodules: {mlp.linear_fc2: bf16}\n", (10, 0), None, "epsilon"),
])  # fmt: skip
def test_a_file_says_as_much_as_the_recipe_that_it_extends(
    tmp_path: Path, text: str, needs: tuple[int, int] | None, engine: str | None, hint: str | None
) -> None:
    deeper = written(tmp_path, "base.yaml", text)
    for place in (deeper, written(tmp_path, "mine.yaml", "extends: base.yaml\n")):
        entry = describe(place)
        assert (entry.needs, entry.engine) == (needs, engine)
        assert any(hint in found for found in entry.hints) if hint else not entry.hints


def test_a_function_of_ones_own_gets_the_engine_that_its_fields_ask_for(tmp_path: Path) -> None:
    code = (
        "from mpbridge.precision.registry import get_mixed_precision_config\n\n\n"
        "def wide():\n    return get_mixed_precision_config('fsdp_adamw').derive(grad_reduce_in_fp32=False)\n"
    )
    place = written(tmp_path, "mine.py", code)
    assert describe(f"{place}:wide").engine == "fsdp2"
    assert resolved(f"{place}:wide").engine == "fsdp2"


@pytest.mark.parametrize("given", ["extends", {"recipe": "bf16_mixed", "params_dtype": "fp32", "main_params_dtype": "fp32"}])  # fmt: skip
def test_wide_storage_resolves_to_an_engine_that_keeps_it_and_breaks_no_rule(tmp_path: Path, given: object) -> None:
    mixed = written(tmp_path, "b.yaml", "extends: fp32_params_bf16_compute\n") if given == "extends" else given
    run = resolved(mixed)
    assert run.engine == "fsdp2"
    assert not [found for found in broken(run.policy, run.facts) if found.severity == "error"]
    told = resolved(mixed, engine="mcore")
    assert "fp32-storage-under-16-bit-compute" in {found.rule for found in broken(told.policy, told.facts)}


def test_registering_copies_no_number() -> None:
    @register(name="mine_of_requirements")
    def mine() -> MixedPrecisionConfig:
        return MixedPrecisionConfig(bf16=True, fp4="e2m1")

    try:
        assert recipes["mine_of_requirements"].needs == (10, 0)
    finally:
        unregister("mine_of_requirements")
