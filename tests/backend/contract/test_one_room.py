"""megatron-core's private names stand in one room, so that another version of it means changes there."""

import ast
from pathlib import Path

import mpbridge

ROOT = Path(mpbridge.__file__).parent
INSIDE = (
    "is_stub_optimizer", "shard_fp32_groups", "shard_float16_groups", "shard_fp32_from_float16_groups", "model_float16_groups",
)  # fmt: skip
"""What its optimizers are made of; public by their spelling, and no part of what it documents."""


def test_private_names_of_megatron_core_are_used_in_one_room() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT)
        if place.as_posix().startswith(("backend/megatron/", "precision/megatron_spec/")):
            continue
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in ("megatron", *INSIDE)):  # nothing to parse
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megatron":
                private = [name.name for name in node.names if name.name.startswith("_")]
                found += [f"{place}:{node.lineno} imports {name}" for name in private]
            if isinstance(node, ast.Attribute) and node.attr in INSIDE:
                found.append(f"{place}:{node.lineno} reads {node.attr}")
    assert found == []
