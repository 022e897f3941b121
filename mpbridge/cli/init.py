"""`mpbridge init [DIR]`: creates a folder for a first run: configuration, recipe, script, and the commands."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpbridge.cli.options import DEFAULT_CONFIG, arg, find_config, whole
from mpbridge.cli.text import print_line
from mpbridge.common.errors import BadValue, MpbridgeError
from mpbridge.common.files import folder_for, text_of, write
from mpbridge.common.machines import key, machine
from mpbridge.common.probe import installed, this_machine
from mpbridge.planning.capability import ASSUMED, can_run
from mpbridge.planning.memory.by_role import fit
from mpbridge.precision.registry import describe, get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.precision.yaml_loader import load_yaml
from mpbridge.settings.container import ConfigContainer
from mpbridge.settings.huggingface.folder import is_reference
from mpbridge.settings.huggingface.section import tree
from mpbridge.settings.load import EXTENDS, dump_yaml
from mpbridge.settings.other_recipe import with_recipe
from mpbridge.settings.training import entries_of
from mpbridge.training.admission import place_fault
from mpbridge.training.data.sources import located

SUMMARY = "create a starter folder: a configuration, a recipe, a script, and the commands"
DEFAULT_RECIPE = "bf16_mixed"
NODE = 8
"""GPUs of a node."""
TARGETS = ("h100", "b200", "rtx5090")
"""Candidate machines for the folder's commands; the first that runs the recipe is used."""
WHAT = {
    "config.yaml": "the run: model, optimizer, batches, data, checkpoints",
    "recipe.yaml": "its precision",
    "train.py": "the same run from Python, also under torchrun",
    "README.md": "the commands",
}
"""File -> its description."""

SECTIONS = {
    "logger": """logger:
  log_dir: run # metrics, decisions and audit results""",
    "checkpoint": """checkpoint:
  save: run/checkpoints
  load: run/checkpoints # the command that starts the run also resumes it
  save_interval: 50""",
}
"""Section -> its text, for configurations that lack it."""

RECIPE = """# All fields of a recipe: mpbridge show {recipe}
extends: {recipe}
# gradients in 16 bits on the wire:
# grad_reduce_in_fp32: false
# only the MLP's linears in FP8:
# modules:
#   mlp.*: {{fp8: hybrid, fp8_recipe: tensorwise}}
"""

SCRIPT = '''"""Trains with config.yaml. `python train.py optimizer.lr=1e-3`; on two processes: `torchrun --nproc-per-node 2 train.py`."""

import os
import sys
from pathlib import Path

from mpbridge import ConfigContainer, pretrain

config = ConfigContainer.load(Path(__file__).with_name("config.yaml"), sys.argv[1:])
run = config.resolved(world_size=int(os.environ.get("WORLD_SIZE", "1")))

if __name__ == "__main__":
    pretrain(run)
'''

_README = """# A run of mpbridge

```bash
{commands}
```

Set `data.corpus` to train on your own text (files or folders) instead of the data in config.yaml. `mpbridge list` shows the recipes that recipe.yaml can extend.
"""
ARGUMENTS = (
    arg("folder DIR", "where to write (default: here)", nargs="?", default="."),
    arg("--config FILE", f"configuration to start from (default: {DEFAULT_CONFIG})"),
    arg("--recipe NAME", f"recipe that recipe.yaml extends (default: {DEFAULT_RECIPE})", default=DEFAULT_RECIPE),
    arg(
        "--target GPU",
        f"GPU of the folder's commands (default: the first of {', '.join(TARGETS)} that runs the recipe)",
    ),
    arg("--world-size N", "processes (default: the fewest of a node in which it fits)", whole, least=1),
    arg("overrides key=value", "settings that config.yaml gets, such as those that check offers", nargs="*"),
)


def run(args: argparse.Namespace) -> int:
    """Writes the files, or none if one of them exists."""
    if "=" in args.folder and not Path(args.folder).exists():  # settings without a folder
        args.folder, args.overrides = ".", [args.folder, *args.overrides]
    for one in args.overrides:
        if one.startswith("mixed_precision"):
            raise BadValue(f"{one}: what the run computes in is recipe.yaml's, which extends --recipe NAME")
    folder = Path(args.folder)
    if fault := place_fault("DIR", folder):
        raise BadValue(fault)
    get_mixed_precision_config(args.recipe)  # report a misspelled name before anything is written
    files = starter(starting_text(find_config(args.config), args.overrides), describe(args.recipe).name)
    config = load_yaml(files["config.yaml"])
    settings = "".join(f" {one}" for one in _to_fill_in(config, folder))
    files["README.md"] = _readme(args, config, settings)
    taken = [str(folder / name) for name in files if (folder / name).exists()]
    if taken:
        raise BadValue(f"{', '.join(taken)} already exist: choose an empty folder (mpbridge init DIR)")
    _write(folder, files)
    for name in files:
        print_line(f"{folder / name}  {WHAT[name]}")
    go = "" if folder == Path(".") else f"cd {folder} && "
    world = args.world_size or 1
    if world == 1:
        # on a machine that does not run the recipe, what follows emulates it
        native = can_run(resolve(get_mixed_precision_config(args.recipe)), this_machine(), installed()).native
        options = "" if native else " --emulate"
        then = f" && mpbridge train --config config.yaml{options}{settings}"
    else:
        options, then = f" --target {_target(args)} --world-size {world}", " (README.md has what follows)"
    print_line("", f"next: {go}mpbridge check --config config.yaml{options}{settings}{then}")
    if settings:
        print_line(f"set these on the command line or in config.yaml:{settings}")
    return 0


def _write(folder: Path, files: Mapping[str, str]) -> None:
    try:
        with folder_for(folder), contextlib.ExitStack() as undone:
            for name, text in files.items():
                undone.callback((folder / name).unlink, missing_ok=True)
                write(folder / name, text)
            undone.pop_all()
    except (FileNotFoundError, PermissionError) as error:  # as in /proc, whose folders say that they can be written to
        raise BadValue(
            f"{folder} cannot be created ({error.strerror}), expected a folder, or a path where one can be created"
        ) from None


def _readme(args: argparse.Namespace, config: Mapping[str, Any], settings: str) -> str:
    """README.md: the commands of this configuration with this recipe. settings: what config.yaml leaves to the user, each preceded by a blank."""
    policy, target = resolve(get_mixed_precision_config(args.recipe)), _target(args)
    base = ConfigContainer.load(find_config(args.config), args.overrides, check=False)
    base.mixed_precision = with_recipe(base.mixed_precision, args.recipe)
    processes = args.world_size or _processes(base, target)
    log_dir = (config.get("logger") or {}).get("log_dir") or "run"
    run = f"train --config config.yaml{settings}"
    several = f"torchrun --nproc-per-node {max(2, processes)} -m mpbridge {run}"
    if processes > NODE:
        several = f"mpbridge launch --nodes {-(-processes // NODE)} --gpus-per-node {NODE} -- {run}"
    check = f"mpbridge check --config config.yaml --target {target} --world-size {processes}{settings}"
    commands = [
        (f"mpbridge plan --config config.yaml{settings}", "which fields the recipe writes"),
        (check, "valid there? does it fit? how fast?"),
    ]
    if processes == 1:
        short = "" if "train.train_iters" in settings else " train.train_iters=20"
        commands.append((f"mpbridge {run}{short}", "train: settings follow the options"))
    if processes == 1 and policy.quantized:
        commands.append((f"mpbridge {run} --emulate", "without such a GPU: emulate its rounding"))
    commands += [(several, ""), (f"mpbridge report {log_dir}", "how it went: audits, curves, can it resume?")]
    width = max(len(command) for command, said in commands if said)
    lines = [f"{command:{width}}  # {said}" if said else command for command, said in commands]
    return _README.format(commands="\n".join(lines))


def _target(args: argparse.Namespace) -> str:
    if args.target is not None:
        return key(machine(args.target).name)
    policy = resolve(get_mixed_precision_config(args.recipe))
    return next((name for name in TARGETS if can_run(policy, machine(name), ASSUMED).native), TARGETS[0])


def _processes(base: ConfigContainer, target: str) -> int:
    """The smallest world within one node in which the fullest rank's states fit, else the smallest valid one."""
    least = base.smallest_world()
    for world in range(least, NODE + 1, least):
        try:
            run = base.resolved(world, training=False)
        except MpbridgeError:  # a batch that cannot be divided over this world
            continue
        if fit(run.policy, run.facts, machine(target)).ok:
            return world
    return max(least, NODE)


def _to_fill_in(config: Mapping[str, Any], folder: Path) -> list[str]:
    """Settings that the configuration needs to train there, with an initial value, or a placeholder in capitals for what only the user knows."""
    wanted = (("train", "train_iters", "100"), ("optimizer", "lr", "1e-5"))
    unset = [one for one in wanted if (config.get(one[0]) or {}).get(one[1]) is None]
    missing = [f"{section}.{name}={value}" for section, name, value in unset]
    entries = entries_of((config.get("data") or {}).get("corpus") or "stdlib")
    local = [str(folder / entry) for entry in entries if entry != "stdlib"]
    return [*missing, "data.corpus=YOUR_TEXT"] if local and located(local)[1] else missing


def starting_text(place: Path, overrides: Sequence[str] = ()) -> str:
    """The text of a configuration, or of one made from a Hugging Face folder; with overrides, without its comments.

    Raises BadValue or Contradiction if it cannot be used.
    """
    made = ConfigContainer.load(place, overrides)
    if overrides:
        tokenizer = made.data.get("tokenizer")
        if is_reference(str(place)) and tokenizer:
            made.data["tokenizer"] = str(Path(tokenizer).absolute())
        for text in SECTIONS.values():  # a section that overrides alone began gets what it would have without them
            ((section, usual),) = load_yaml(text).items()
            mine = getattr(made, section)
            if mine and {f"{section}.{name}" for name in mine} <= {one.partition("=")[0] for one in overrides}:
                more = {"load": mine["save"]} if "save" in mine else {}
                setattr(made, section, usual | more | dict(mine))
        return made.to_yaml()
    if not is_reference(str(place)):
        text = text_of(place)
        return made.to_yaml() if EXTENDS in (load_yaml(text) or {}) else text
    found = tree(str(place))
    if "tokenizer" in found["data"]:  # relative to another folder than config.yaml's
        found["data"]["tokenizer"] = str(Path(found["data"]["tokenizer"]).absolute())
    return dump_yaml(found)


def starter(config: str, recipe: str) -> dict[str, str]:
    """File name -> text. config: a configuration's text, whose recipe becomes the folder's own; what it freezes stays in it, for whatever recipe follows. Raises Contradiction."""
    given = load_yaml(config) or {}
    precision = with_recipe(given.get("mixed_precision"), recipe)
    precision = "recipe.yaml" if isinstance(precision, str) else precision | {"recipe": "recipe.yaml"}
    wanted, line = given | {"mixed_precision": precision}, dump_yaml({"mixed_precision": precision}).rstrip()
    config, found = re.subn(r"^mixed_precision:.*$", lambda _: line, config, count=1, flags=re.MULTILINE)
    config = config if found else f"{line}\n{config}"
    if _loaded(config) != wanted:  # its recipe takes several lines
        config = dump_yaml(wanted)
    missing = [text for name, text in SECTIONS.items() if not re.search(rf"^{name}:", config, re.MULTILINE)]
    return {
        "config.yaml": "\n".join([config.rstrip(), *missing]) + "\n",
        "recipe.yaml": RECIPE.format(recipe=recipe),
        "train.py": SCRIPT,
    }


def _loaded(text: str) -> Any:
    import yaml

    try:
        return load_yaml(text)
    except yaml.YAMLError:
        return None
