"""Writes mpbridge/settings/typed.pyi: the settings of every section with their types, for editors and mypy.

Run it after scripts/generate/make_schema.py or a change to mpbridge/settings/sections.py; tests/settings/test_typed.py fails until then.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that it runs in a checkout without installation

from mpbridge.precision.megatron_spec.versions import described
from mpbridge.settings.schema import SECTIONS, Setting, settings

PLACE = ROOT / "mpbridge" / "settings" / "typed.pyi"
HEAD = '''"""The settings of ConfigContainer's sections, as editors and mypy see them. Written by scripts/generate/make_typing.py; imported at run time by nothing."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypedDict, TypeVar

import torch

from mpbridge.settings.schema import Section
from mpbridge.common.formats import DType

Dtype: TypeAlias = str | torch.dtype | DType

class ConfigObject(Protocol):
    """One of megatron-core's config objects, given in place of a section."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

Read = TypeVar("Read", covariant=True)
Given = TypeVar("Given", contravariant=True)

class SectionField(Protocol[Read, Given]):
    """A section is given as a mapping or a config object, and read as a mapping with attributes."""

    def __get__(self, owner: object, kind: Any = None) -> Read: ...
    def __set__(self, owner: object, value: Given | ConfigObject | None) -> None: ...
'''
WORDS = {
    "null": "None",
    "dtype": "Dtype",
    "activation": "str | Callable[..., Any]",
    "object": "Any",
    "list": "list[Any]",
}


def annotation(setting: Setting) -> str:
    """The Python type of a setting."""
    choices = f"Literal[{', '.join(map(repr, setting.choices))}]"

    def spelled(kind: str) -> str:
        if kind.startswith("list["):
            return f"list[{spelled(kind.removeprefix('list[').removesuffix(']'))}]"
        return choices if kind == "choice" else WORDS.get(kind, kind)

    kinds = list(dict.fromkeys(spelled(kind) for kind in setting.types))
    return "Any" if "Any" in kinds else " | ".join(kinds)


def text() -> str:
    """The file's content."""
    parts = [HEAD]
    for section in SECTIONS:
        known: dict[str, Setting] = {}
        for version in (
            described()
        ):  # settings of all described megatron-core versions; the oldest version's type if several have it
            known = {**settings(section, latent=True, version=version), **known}
        rows = [f"    {name}: {annotation(setting)}" for name, setting in known.items()]
        name = "".join(word.capitalize() for word in section.split("_")) if section != "ddp" else "DDP"
        parts.append(
            f'class {name}Settings(TypedDict, total=False):\n    """Keys of `{section}`."""\n\n' + "\n".join(rows)
        )
        parts.append(f'class {name}Section(Section):\n    """`ConfigContainer.{section}`."""\n\n' + "\n".join(rows))
        parts.append(f"{name}Field: TypeAlias = SectionField[{name}Section, {name}Settings | {name}Section]")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the file is out of date")
    if parser.parse_args().check:
        raise SystemExit(
            0
            if PLACE.read_text(encoding="utf-8") == text()
            else f"{PLACE.name} is out of date: run scripts/generate/make_typing.py"
        )
    PLACE.write_text(text(), encoding="utf-8")
    print(f"wrote {PLACE.name}")
