"""`mpbridge completion SHELL`: prints a script for shell completion of commands, options, recipes and configurations."""

from __future__ import annotations

import argparse
from typing import Any

from mpbridge.cli.options import add_arguments, arg
from mpbridge.cli.text import print_whole
from mpbridge.common.errors import MpbridgeError
from mpbridge.common.machines import machines
from mpbridge.common.shipped import configurations, install, recipe_files
from mpbridge.precision.registry import aliases, recipes

SUMMARY = "print a script for shell completion of commands, options, recipes and configurations"
SHELLS = ("bash", "zsh", "fish")
NOTHING = {
    "zsh": "_mpbridge_nothing",
    "preamble": {"zsh": "_mpbridge_nothing() { return 1 }"},
}
"""For key=value and other free text. zsh prints the help of an argument without an action, and then inserts no option either."""
EPILOG = """examples:
  bash   eval "$(mpbridge completion bash)"            in ~/.bashrc
  zsh    mpbridge completion zsh > DIR/_mpbridge       in a folder of $fpath, before compinit
  fish   mpbridge completion fish > ~/.config/fish/completions/mpbridge.fish"""
ARGUMENTS = (arg("shell", "the shell", SHELLS),)


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    try:
        import shtab
    except ImportError:
        raise MpbridgeError(f"completion requires shtab, which is not installed ({install('completion')})") from None
    print_whole(shtab.complete(everything(shtab), shell=args.shell))
    return 0


def everything(shtab: Any) -> argparse.ArgumentParser:
    """One parser with all verbs; arguments for recipes, machines, configurations and files are marked as such."""
    from mpbridge.cli.main import verb_of, verbs

    parser = argparse.ArgumentParser(prog="mpbridge", description="one name decides every precision fact of a run")
    parser.add_argument("--version", action="version", version="", help="the version")
    below = parser.add_subparsers(dest="command")
    known = verbs()
    for verb in known:
        found = verb_of(verb)
        sub = below.add_parser(verb, description=found.SUMMARY, help=found.SUMMARY)
        add_arguments(sub, found.ARGUMENTS)
        for action in sub._actions:
            _annotate(action, shtab)
    below.add_parser("help", help="what a command does").add_argument("verb", nargs="?", choices=known)
    return parser


def _annotate(action: Any, shtab: Any) -> None:
    if action.dest in ("recipe", "a", "b"):
        action.complete = _names_or_files("recipe", [*recipes, *aliases, *recipe_files()])
    elif action.dest == "config":
        action.complete = _names_or_files("config", list(configurations()))
    elif action.dest == "target" and action.option_strings:
        action.choices = sorted(machines)
    elif action.metavar == "FILE" or action.metavar in ("RUN", "RUN_B", "SOURCE"):
        action.complete = shtab.FILE
    elif action.metavar in ("DIR", "RUN_DIR") or action.dest == "checkpoint":
        action.complete = shtab.DIRECTORY
    elif not action.option_strings and not action.choices:
        action.complete = NOTHING


def _names_or_files(kind: str, names: list[str]) -> dict[str, Any]:
    """What each shell offers: these names, and files."""
    words, function = " ".join(names), f"_mpbridge_{kind}"
    return {
        "bash": function,
        "zsh": function,
        "fish": f"(printf '%s\\n' {words}; __fish_complete_path (commandline -ct))",
        "preamble": {
            "bash": f'{function}() {{ compgen -W "{words}" -- $1; compgen -f -- $1; }}',
            "zsh": f"{function}() {{ _alternative '{kind}:{kind}:({words})' 'files:file:_files' }}",
        },
    }
