"""Arguments shared by many verbs: the recipe, the configuration, overrides; and the Run that they describe."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpbridge.common.errors import BadValue
from mpbridge.common.shipped import configuration
from mpbridge.common.traits import DEFAULT, engine_names
from mpbridge.settings.huggingface.folder import is_reference

if TYPE_CHECKING:
    from mpbridge.common.facts import Versions
    from mpbridge.settings.container import ConfigContainer, Run
    from mpbridge.settings.draft import FaultFinder

DEFAULT_CONFIG = "gpt_tiny"
EMULATION = {"fast": "true", "te": "te"}
"""Value of --emulate -> the setting's value."""
_PRECISION = ("mixed_precision=", "mixed_precision.recipe=")


@dataclass(frozen=True, slots=True)
class Argument:
    """A row of a verb's ARGUMENTS."""

    name: str
    how: Mapping[str, Any]
    """What argparse's add_argument takes beside the name."""
    least: int | None = None
    """The smallest legal number."""


def arg(spelled: str, said: str, kind: Any = None, *, least: int | None = None, **how: Any) -> Argument:
    """An argument spelled as in a usage line: '--out FILE', '--stages' for a switch, or 'run_dir RUN_DIR' for a positional one with that attribute.

    said: its help. kind: the type of its value, or a tuple of the legal ones. least: the smallest legal number (`too_small`). how: anything else that
    argparse takes.
    """
    name, _, metavar = spelled.partition(" ")
    how |= {"help": said} | ({"metavar": metavar} if metavar else {})
    if kind is not None:
        how["choices" if isinstance(kind, tuple) else "type"] = kind
    elif name.startswith("--") and not metavar:
        how.setdefault("action", "store_true")
    return Argument(name, how, least)


def add_arguments(parser: argparse.ArgumentParser, rows: Iterable[Argument]) -> None:
    """Adds the arguments of a verb; of two rows with one name (--te is in RUN and in TARGET) the first counts."""
    known: set[str] = set()
    for row in rows:
        if row.name not in known:
            parser.add_argument(row.name, **row.how)
        known.add(row.name)


def too_small(args: argparse.Namespace, rows: Iterable[Argument]) -> list[str]:
    """Every number below the `least` of its row, as faults."""
    given = [(row, getattr(args, row.name.strip("-").replace("-", "_"), None)) for row in rows]
    return [
        f"{row.name} {value}: expected at least {row.least}"
        for row, value in given
        if row.least is not None and value is not None and value < row.least
    ]


def whole(text: str) -> int:
    """The integer in a text, such as 1000, 1_000 or 1e3. Raises ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        value = float(text)
        if value.is_integer() and abs(value) < 2**53:
            return int(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not an integer: expected one such as 1000 or 1e3")


def _price(text: str) -> float:
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0 <= value < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a price: expected a number of 0 or more, as in 2.5")


JSON = arg("--json", "print JSON")
_RECIPE = (
    arg("--recipe NAME", "a name (mpbridge list), a YAML file, package.module:function or file.py:function"),
    arg("--config FILE", f"a YAML file, the name of a shipped one, such as llama3_8b, or hf:DIR (default: {DEFAULT_CONFIG})"),
    arg("--engine", f"the engine that shards and reduces (default: the recipe's, else {DEFAULT})", engine_names()),
    arg("--emulate", "run a recipe without its hardware: quantized GEMMs in software (alone, or fast), or the modules that --target would build, with Transformer Engine's own Python on the CPU (te)", ("fast", "te")),
    arg("--te X.Y", "with --emulate: the Transformer Engine release whose rules to follow (default: as installed, else 2.11)"),
)  # fmt: skip
_SETTINGS = arg("overrides key=value", "settings that override the file's, such as optimizer.lr=3e-4", nargs="*")
WORLD = arg("--world-size N", "processes (default: as few as the parallel sizes allow)", whole, least=1)
RUN = (*_RECIPE, WORLD, _SETTINGS)
"""The run that a verb is about, which it does not run."""
RUN_HERE = (*_RECIPE, _SETTINGS)
"""The same for a verb that runs it: torchrun says how many processes there are."""
PRICE = arg("--price X", "price of one GPU hour, in any currency", _price)


def container(args: argparse.Namespace) -> ConfigContainer:
    """The configuration that the shared arguments describe; `resolved` reports all its faults at once."""
    from mpbridge.settings.container import ConfigContainer

    overrides = list(args.overrides)
    if args.recipe is not None:
        twice = [text for text in overrides if text.startswith(_PRECISION)]
        if twice:
            raise BadValue(f"recipe {args.recipe} and {twice[0]} both choose the recipe: use only one of them")
        overrides.insert(0, f"mixed_precision.recipe={quoted(args.recipe)}")
    overrides += [f"engine={args.engine}"] if args.engine else []
    overrides += [f"emulate={EMULATION[args.emulate]}"] if args.emulate else []
    played = EMULATION.get(args.emulate) == "te" or any(text == "emulate=te" for text in overrides)
    if args.emulate or played:
        for name in ("target", "te") if played else ("te",):
            given = getattr(args, name, None)
            overrides += [f"{name}={quoted(given)}"] if given else []
    return ConfigContainer.load(find_config(args.config), overrides, check=False)


def resolved(
    args: argparse.Namespace,
    *,
    training: bool = False,
    world_size: int | None = None,
    machine: Any = None,
    versions: Versions | None = None,
    also: FaultFinder | None = None,
) -> Run:
    """The Run that the shared arguments describe.

    world_size: None: --world-size, or the smallest that the parallel sizes allow. training: also require what training needs.
    also: finds further faults in the sections.
    Raises Contradiction with every fault.
    """
    made = container(args)
    wanted = getattr(args, "world_size", None) if world_size is None else world_size
    return made.resolved(
        wanted or made.smallest_world(), machine=machine, versions=versions, training=training, also=also
    )


def find_config(name: str | None) -> Path:
    """The file that `name` refers to (None: the small GPT for a CPU): a path, or a shipped one's name. Raises UnknownName."""
    wanted = DEFAULT_CONFIG if name is None else name
    return Path(wanted) if is_reference(wanted) else configuration(wanted)


def quoted(text: str) -> str:
    """`text` as a YAML string: a recipe may be called 32."""
    return "'" + text.replace("'", "''") + "'"
