"""The built-in recipes: their papers, their values, and every difference from the neighbour's. `python tests/precision/test_recipes.py` rewrites the golden."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpbridge import get_mixed_precision_config, recipes, resolve
from mpbridge.common.formats import DType
from mpbridge.precision.recipes import BUILT_IN, DIFFERENCES

GOLDEN = Path(__file__).parents[1] / "golden" / "recipes.json"
DATA: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
THEIRS: dict[str, dict[str, Any]] = {
    name: DATA["reference"]["class_defaults"] | given for name, given in DATA["reference"]["recipes"].items()
}
DERIVED = {
    # None means these (MixedPrecisionConfig's docstrings); fp8_recipe is not here: with FP8 off theirs is copied to the optimizer and ours is not
    "fp8_param": False, "fp8_param_gather": False, "fp4_param": False, "fp4_param_gather": False, "fp4_recipe": "nvfp4",
    "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0,
}  # fmt: skip


def ours(name: str) -> dict[str, Any]:
    stored = get_mixed_precision_config(name).stored()
    return {field: value.value if isinstance(value, DType) else value for field, value in stored.items()}


def meant(field: str, value: Any) -> Any:
    return DERIVED.get(field) if value is None else value


def test_the_reference_has_the_neighbours_fourteen_recipes_of_31_fields() -> None:
    assert len(THEIRS) == 14
    assert all(len(fields) == 31 for fields in THEIRS.values())
    assert set(THEIRS) <= set(recipes)


def test_every_value_is_the_neighbours_or_a_difference_with_a_reason() -> None:
    for name in THEIRS:
        mine = ours(name)
        different = {field for field, value in THEIRS[name].items() if meant(field, mine[field]) != value}
        different |= {field for field, value in mine.items() if value is not None and field not in THEIRS[name]}
        assert different == {field for recipe, field in DIFFERENCES if recipe == name}


def test_first_last_layers_mean_the_same_although_the_class_defaults_differ() -> None:
    for name, fields in THEIRS.items():
        if fields["first_last_layers_bf16"]:
            expected = (fields["num_layers_at_start_in_bf16"], fields["num_layers_at_end_in_bf16"])
            assert resolve(get_mixed_precision_config(name)).ends == expected


def test_every_difference_says_why() -> None:
    assert all(len(reason) > 40 for reason in DIFFERENCES.values())
    assert {name for name, _ in DIFFERENCES} <= set(THEIRS)


def test_every_recipe_carries_its_papers() -> None:
    for entry in BUILT_IN:
        config = entry.make()
        assert entry.summary
        assert len(entry.summary) < 130
        assert entry.source
        assert entry.status in ("validated", "experimental")
        assert entry.engine in (None, "fsdp2", "megatron_fsdp")
        assert all("(" in hint for hint in entry.hints)  # each with its source
        # quantization needs hardware, nothing else does
        assert (entry.needs is not None) == resolve(config).quantized


def test_a_recipes_need_is_what_the_capability_asks_for() -> None:
    from mpbridge.precision.scalings import SCALINGS

    for entry in BUILT_IN:
        quant = resolve(entry.make()).quant
        assert entry.needs == (None if quant is None else SCALINGS[quant.scaling].hardware.low), entry.name


def test_a_recipes_name_says_what_it_does() -> None:
    words = {
        "mxfp8": "mxfp8", "delayed": "delayed", "subchannel": "blockwise", "current": "tensorwise", "nvfp4": "nvfp4",
    }  # fmt: skip
    for entry in BUILT_IN:
        policy = resolve(entry.make())
        for word, scaling in words.items():
            if word in entry.name:
                # one recipe of the neighbour's is named after another scaling than its own; its summary says so
                misnamed = entry.name == "nanov2_bf16_with_fp8_current_scaling_mixed"
                assert policy.quant is not None
                assert (policy.quant.scaling == scaling) is not misnamed
                assert not misnamed or "despite its name" in entry.summary


def snapshot() -> dict[str, Any]:
    return {name: ours(name) for name in sorted(entry.name for entry in BUILT_IN)}


def test_every_field_of_every_recipe_is_pinned() -> None:
    assert snapshot() == DATA["recipes"], "if the change is meant: python tests/precision/test_recipes.py"


def dump(data: dict[str, Any]) -> str:
    """JSON with one recipe a line."""
    reference = data["reference"]
    theirs, mine = (
        ",\n".join(f"{indent}{json.dumps(name)}: {json.dumps(values)}" for name, values in rows.items())
        for indent, rows in (("   ", reference["recipes"]), ("  ", data["recipes"]))
    )
    source, defaults = (f'  "{key}": {json.dumps(reference[key])},' for key in ("source", "class_defaults"))
    lines = ["{", f' "made_by": {json.dumps(data["made_by"])},', ' "reference": {', source, defaults, '  "recipes": {']
    return "\n".join([*lines, theirs, "  }", " },", ' "recipes": {', mine, " }", "}", ""])


if __name__ == "__main__":
    GOLDEN.write_text(dump(DATA | {"recipes": snapshot()}), encoding="utf-8")
