"""Arguments shared by many verbs: the recipe, the configuration, overrides; and the Run that they describe."""

from __future__ import annotations

import argparse
import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpbridge.common.errors import BadValue
from mpbridge.common.shipped import configuration
from mpbridge.common.traits import DEFAULT, engine_names
from mpbridge.settings.huggingface.folder import is_reference

if TYPE_CHECKING:
    from mpbridge.common.facts import Versions
    from mpbridge.settings.container import ConfigContainer, Run
    from mpbridge.settings.run import FaultFinder

DEFAULT_CONFIG = "gpt_tiny"
EMULATION = {"fast": "true", "te": "te"}
"""Value of --emulate -> the setting's value."""
_PRECISION = ("mixed_precision=", "mixed_precision.recipe=")


def add_run_arguments(parser: argparse.ArgumentParser, *, world: bool = True) -> None:
    """--recipe, --config, --engine, --emulate, key=value ...; world: also --world-size, for verbs that do not run anything."""
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="a name (mpbridge list), a YAML file, package.module:function or file.py:function",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"a YAML file, the name of a shipped one, such as llama3_8b, or hf:DIR (default: {DEFAULT_CONFIG})",
    )
    parser.add_argument(
        "--engine",
        choices=engine_names(),
        help=f"the engine that shards and reduces (default: the recipe's, else {DEFAULT})",
    )
    parser.add_argument(
        "--emulate",
        choices=("fast", "te"),
        help="run a recipe without its hardware: quantized GEMMs in software (alone, or fast), or the modules that --target would build, with "
        "Transformer Engine's own Python on the CPU (te)",
    )
    parser.add_argument(
        "--te",
        metavar="X.Y",
        help="with --emulate: the Transformer Engine release whose rules to follow (default: as installed, else 2.11)",
    )
    if world:
        parser.add_argument(
            "--world-size", type=whole, metavar="N", help="processes (default: as few as the parallel sizes allow)"
        )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that override the file's, such as optimizer.lr=3e-4"
    )


def whole(text: str) -> int:
    """The integer in a text, such as 1000, 1_000 or 1e3. Raises ArgumentTypeError."""
    try:
        return int(text)
    except ValueError:
        pass
    with contextlib.suppress(ValueError):
        value = float(text)
        if value.is_integer() and abs(value) < 2**53:
            return int(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not an integer: expected one such as 1000 or 1e3")


def add_price_argument(parser: argparse.ArgumentParser) -> None:
    """--price."""
    parser.add_argument("--price", type=_price, metavar="X", help="price of one GPU hour, in any currency")


def _price(text: str) -> float:
    """A price of 0 or more. Raises ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0 <= value < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a price: expected a number of 0 or more, as in 2.5")


def wanted_world(args: argparse.Namespace) -> int | None:
    """--world-size; None if not given. Raises BadValue for less than one process."""
    wanted: int | None = getattr(args, "world_size", None)
    if wanted is not None and wanted < 1:
        raise BadValue(f"--world-size {wanted}: expected at least 1")
    return wanted


def container(args: argparse.Namespace) -> ConfigContainer:
    """The configuration that the shared arguments describe; `resolved` reports all its faults at once."""
    from mpbridge.settings.container import ConfigContainer

    overrides = list(args.overrides)
    if args.recipe is not None:
        twice = [text for text in overrides if text.startswith(_PRECISION)]
        if twice:
            raise BadValue(f"--recipe {args.recipe} and {twice[0]}: two recipes; use only one of them")
        overrides.insert(0, f"mixed_precision.recipe={_quoted(args.recipe)}")
    overrides += [f"engine={args.engine}"] if args.engine else []
    overrides += [f"emulate={EMULATION[args.emulate]}"] if args.emulate else []
    played = EMULATION.get(args.emulate) == "te" or any(text == "emulate=te" for text in overrides)
    if args.emulate or played:
        for name in ("target", "te") if played else ("te",):
            given = getattr(args, name, None)
            overrides += [f"{name}={_quoted(given)}"] if given else []
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
    wanted = wanted_world(args) if world_size is None else world_size
    return made.resolved(
        wanted or made.smallest_world(), machine=machine, versions=versions, training=training, also=also
    )


def find_config(name: str | None) -> Path:
    """The file that `name` refers to (None: the small GPT for a CPU): a path, or a shipped one's name. Raises UnknownName."""
    wanted = DEFAULT_CONFIG if name is None else name
    return Path(wanted) if is_reference(wanted) else configuration(wanted)


def _quoted(text: str) -> str:
    """`text` as a YAML string: a recipe may be called 32."""
    return "'" + text.replace("'", "''") + "'"
