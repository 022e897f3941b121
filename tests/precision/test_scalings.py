"""The table of scalings: complete rows, and no second table of the same names anywhere in the package."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from mpbridge.common.errors import BadValue, Contradiction, UnknownName
from mpbridge.common.formats import FORMATS
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.policy import Quant
from mpbridge.precision.registry import recipes
from mpbridge.precision.resolve import resolve
from mpbridge.precision.scalings import ELEMENTS, SCALINGS, bits_of, choices, scaling, scaling_of_recipe

PACKAGE = Path(__file__).resolve().parents[2] / "mpbridge"
FOREIGN = {
    "interop/stacks/": "what other libraries call a scaling, and which of ours they have",
    "interop/megatron_bridge.py": "Megatron Bridge's own values",
    "settings/huggingface/served.py": "which scalings a format of served folders holds unchanged",
    "te_cpu/": "the scaling modes of Transformer Engine's binding, which are its words and fewer than ours",
}
MAY_NAME_ONE = FOREIGN | {
    "precision/recipes.py": "a recipe says which scaling it is",
    "planning/rules/": "a rule may speak of one scaling",
    "interop/stacks/": "another stack's word for a scaling stands beside ours",
    "training/disclosure/evidence.py": "MLPerf's words for precisions",
    "cli/certify.py": "variants are of NVFP4 alone",
    "numerics/certificates/expected.py": "variants are of NVFP4 alone",
    "settings/huggingface/kept.py": "engines exclude modules by the method's name, which is a scaling's in one case",
    "training/serving/": "causes and activations of served formats are by scaling",
    "observe/audit/orthogonal.py": "a word of Muon for tensor parallelism",
    "precision/registry.py": "words of other stacks, with what to choose here",
    "precision/config.py": "megatron-core's own defaults, which mean nothing",
    "precision/megatron_spec/fields.py": "megatron-core's own defaults of fp8_recipe and fp4_recipe",
}


def displays(tree: ast.AST) -> list[ast.AST]:
    """Every literal collection of the module, and every annotation Literal[...]."""
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Dict, ast.Set, ast.List, ast.Tuple))]


def names_in(node: ast.AST) -> list[str]:
    elements = node.keys if isinstance(node, ast.Dict) else node.elts  # type: ignore[attr-defined]
    return [e.value for e in elements if isinstance(e, ast.Constant) and e.value in SCALINGS]


@functools.cache
def sources() -> list[tuple[str, ast.AST]]:
    """The modules whose text has the name of a scaling."""
    every = sorted((path.relative_to(PACKAGE).as_posix(), path.read_text()) for path in PACKAGE.rglob("*.py"))
    found = [(name, text) for name, text in every if any(word in text for word in SCALINGS)]
    return [(name, ast.parse(text)) for name, text in found if not name.startswith("precision/scalings/")]


def test_no_other_module_has_a_table_of_scalings() -> None:
    ours = [(name, tree) for name, tree in sources() if not name.startswith(tuple(FOREIGN))]
    literals = [(f"{name}:{node.lineno}", names_in(node)) for name, tree in ours for node in displays(tree)]  # type: ignore[attr-defined]
    assert [f"{place} {names}" for place, names in literals if len(names) > 1] == []


def test_a_scaling_is_named_only_where_one_of_them_is_meant() -> None:
    words = set(SCALINGS) - {"custom"}  # an everyday word
    ours = [(name, tree) for name, tree in sources() if not name.startswith(tuple(MAY_NAME_ONE))]
    literals = [(name, node) for name, tree in ours for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert [f"{name}:{node.lineno} {node.value!r}" for name, node in literals if node.value in words] == []


@pytest.mark.parametrize("row", SCALINGS.values(), ids=list(SCALINGS))
def test_every_row_is_complete(row) -> None:
    assert row.formats
    assert set(row.formats) <= set(ELEMENTS)
    assert set(row.substitutes) <= set(SCALINGS)
    assert row.recipe_class()
    assert scaling_of_recipe(row.recipe_class()) == row.name
    assert all(source for source in (row.hardware.source, row.sizes.source, row.sizes.shard_source))
    if row.blocks is not None:
        assert {block.scale for block in row.blocks} <= {"fp32", *FORMATS}
        assert row.emulation
    if row.entry is not None:
        assert f"bf16_with_{row.entry}_mixed" in recipes


def test_blocks_are_those_of_transformer_engine() -> None:
    blocks = {name: row.blocks for name, row in SCALINGS.items() if row.blocks}
    extents = {name: [(block.across, block.along) for block in both] for name, both in blocks.items()}
    assert extents["mxfp8"] == [(1, 32), (1, 32)]
    assert extents["blockwise"] == [(1, 128), (128, 128)]
    assert extents["nvfp4"] == [(1, 16), (16, 16)]
    assert extents["tensorwise"] == extents["delayed"] == [(0, 0), (0, 0)]


def test_a_scaling_without_a_row_cannot_be_resolved() -> None:
    with pytest.raises(Contradiction, match="fp8_recipe='columnwise' is not one of tensorwise, delayed"):
        resolve(MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="columnwise"))
    with pytest.raises(UnknownName, match="no scaling named 'mxfp9'"):
        Quant(format="e4m3", scaling="mxfp9")
    with pytest.raises(BadValue, match="nvfp4 scaling of format 'e4m3': expected one of e2m1"):
        Quant(format="e4m3", scaling="nvfp4")


def test_choices_follow_from_formats() -> None:
    assert {bits_of(format) for format in ELEMENTS} == {8, 4}
    assert "nvfp4" not in choices(8)
    assert choices(4) == ("nvfp4", "custom")


def test_the_transposed_copy_depends_on_the_hardware_for_one_scale_a_tensor_only() -> None:
    assert [scaling("tensorwise").keeps_transposed(arch) for arch in (None, (9, 0), (10, 0), (12, 0))] == [True, True, False, True]  # fmt: skip
    assert scaling("mxfp8").keeps_transposed((10, 0))


def test_an_option_is_read_as_transformer_engine_reads_it() -> None:
    rounding = scaling("nvfp4").option("stochastic_rounding")
    name = rounding.variable
    assert [rounding.read(e) for e in ({}, {name: "0"}, {name: "1"}, {name: "true"})] == [True, True, False, True]
    assert rounding.setting(False) == "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1"
    assert rounding.setting(True) == "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING unset"
    backward = scaling("mxfp8").option("backward")
    with pytest.raises(BadValue, match="NVTE_BACKWARD_OVERRIDE='yes': Transformer Engine accepts high_precision"):
        backward.read({"NVTE_BACKWARD_OVERRIDE": "yes"})
