"""Writes mpbridge/precision/megatron_spec/schema/<version>.json: the fields of a megatron-core's config classes, to check configs without importing it.

It describes the imported megatron-core: the installed one, or with PYTHONPATH=<folder> the `megatron/core` of a source tree in that folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import math
import types
import typing
from typing import Any, Union, get_args, get_origin

import megatron.core
import torch
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mpbridge.common.formats import dtype
from mpbridge.precision.megatron_spec.versions import FOLDER

PLACE = FOLDER / f"{megatron.core.__version__}.json"
CLASSES = (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
PLAIN = {bool: "bool", int: "int", float: "float", str: "str", type(None): "null", torch.dtype: "dtype", list: "list"}


def described(hint: Any) -> tuple[list[str], list[str]]:
    """(the names of the legal types, the legal words) of an annotation."""
    origin = get_origin(hint)
    if hint in PLAIN:
        return [PLAIN[hint]], []
    if origin in (Union, types.UnionType):
        parts = [described(part) for part in get_args(hint)]
        return [name for names, _ in parts for name in names], [word for _, words in parts for word in words]
    if origin is typing.Literal:
        return ["choice"], list(get_args(hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ["choice"], [member.name for member in hint]
    if origin in (list, tuple):
        names, words = described(get_args(hint)[0])
        return [f"list[{names[0]}]"], words
    # callables, context managers, objects of megatron-core: values that only Python code can create
    return ["object"], []


def plain(value: Any) -> Any:
    """A default in JSON types."""
    if isinstance(value, torch.dtype):
        return dtype(value).short
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    return value.__name__ if callable(value) else value


def entry(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """The schema's entry for one field."""
    names, words = described(hint)
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if default is None and "null" not in names:  # upstream writes `x: int = None`
        names.append("null")
    if field.name == "activation_func":
        names = ["activation"]
    record: dict[str, Any] = {"types": list(dict.fromkeys(names)), "default": plain(default)}
    return record | ({"choices": list(dict.fromkeys(words))} if words else {})


def schema() -> dict[str, Any]:
    """The whole schema of the installed megatron-core."""
    out: dict[str, Any] = {"megatron_core": megatron.core.__version__}
    for cls in CLASSES:
        hints = typing.get_type_hints(cls)
        out[cls.__name__] = {
            f.name: entry(f, hints[f.name]) for f in dataclasses.fields(cls) if not f.name.startswith("_")
        }
    base = out["TransformerConfig"]
    # MLATransformerConfig extends TransformerConfig: only the differences are stored
    out["MLATransformerConfig"] = {
        name: record for name, record in out["MLATransformerConfig"].items() if base.get(name) != record
    }
    return out


def text() -> str:
    """The file's content: one field per line, so that a new megatron-core shows as a readable diff."""
    lines = []
    for name, value in schema().items():
        if isinstance(value, dict):
            rows = ",\n".join(f"    {json.dumps(field)}: {json.dumps(record)}" for field, record in value.items())
            lines.append(f"  {json.dumps(name)}: {{\n{rows}\n  }}")
        else:
            lines.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if the file does not match the installed megatron-core"
    )
    if parser.parse_args().check:
        raise SystemExit(
            0
            if PLACE.read_text(encoding="utf-8") == text()
            else f"{PLACE.name} is stale: run scripts/generate/make_schema.py"
        )
    PLACE.write_text(text(), encoding="utf-8")
    print(f"wrote {PLACE.name}")
