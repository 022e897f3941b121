"""The entry point: finds the verb, parses, runs it, and turns errors into text and an exit code. Nothing heavy is imported here.

Exit codes: 0 done, 1 the answer is no, 2 misuse, 3 training stopped before its end, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from keyword import iskeyword
from pathlib import Path
from typing import Any, NoReturn

from mpbridge.cli.options import add_arguments, too_small
from mpbridge.cli.text import columns_here, print_line
from mpbridge.common.errors import BadValue, Contradiction, MpbridgeError, Refused, UnknownName, nearest
from mpbridge.common.files import NO_ROOM
from mpbridge.common.prose import hanging, prose
from mpbridge.common.report.console import silence, warn
from mpbridge.common.shipped import VERSION, install
from mpbridge.common.upstream import without_chatter

NOT_VERBS = frozenset({"main", "options", "text"})
BESIDE = {
    "audit": "report", "precision": "report", "diagnose": "report", "recommend": "layouts", "export": "import", "verify": "disclose",
    "mismatch": "contract", "calibrate": "simulate", "tune": "rehearse", "on-cpu": "train",
}  # fmt: skip
"""Verb -> the verb in whose module it stands, as a class (`audit`: AuditVerb): they share their subject."""
FOREIGN = frozenset({"on-cpu", "launch"})
"""Verbs that end in another command, whose arguments are not theirs, regardless of position."""
NEEDED = {"megatron": "megatron-core", "torch": "torch", "numpy": "NumPy"}
"""Module -> package of dependencies that light verbs and those for foreign modules do not need: `pip install --no-deps` omits them."""
DAY = ("list", "show", "plan", "check", "init", "train", "launch", "report")
"""The verbs on the first page of the help text, in the order of a user's day."""
ALIASES = {"diff": ("compare", "--execute")}
"""A verb of before -> what it is now."""
PARTS = {
    "the long form of one part of check": ("memory", "estimate", "layouts", "recommend"),
    "the long form of one part of report": ("plot", "audit", "precision", "diagnose", "resume-check"),
}
"""Groups of verbs on the second page; the others follow them, by name."""


def entry() -> None:
    """The installed command's entry point: `main`, then exit."""
    raise SystemExit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. argv: without the program's name; None: sys.argv's."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments and arguments[0] not in FOREIGN
    try:
        for name in ("stdout", "stderr"):  # a run continues without a reader, for its files and checkpoints
            if arguments[:1] == ["train"] and getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        if sys.stdout is None:  # closed by the caller: Python would silently discard output
            text = "standard output is closed, so nothing could be printed"
            _complain(BadValue(f"{text} (redirect it to /dev/null if that is intended)"), as_json)
            return 2
        code = _flushed(_dispatch(arguments))
    except MpbridgeError as error:
        code = Refused.exit_code if _without_room(error) else error.exit_code
        _complain(error, as_json, code)
    except ModuleNotFoundError as error:
        needed, asker = NEEDED.get((error.name or "").partition(".")[0]), _importer(error)
        ours = asker.startswith("mpbridge.")
        # what a script imports is the script's own affair, as under `python SCRIPT`: the traceback says who asked
        if (arguments[0] == "on-cpu" and "torch" in sys.modules) or (ours and needed is None):
            raise
        text = f"this requires {needed}, which is not installed in this environment: {install()} installs it with its dependencies"
        if not ours:
            text = f"{asker} imports {error.name}, which is not installed in this environment: install the package that provides it"
        _complain(Refused(text), as_json)
        code = Refused.exit_code
    except BrokenPipeError:
        # `mpbridge list | head`: the reader closed the pipe; nothing may be written at exit either. The answer is unknown, so the exit code
        # is that of a program ended by SIGPIPE (128 + SIGPIPE), never success
        silence()
        code = 141
    except OSError as error:
        if arguments[:1] == ["on-cpu"] and "torch" in sys.modules:
            raise  # the script's own, a network that is not there for example
        # errors while writing: a full disk, a file in place of a folder
        code = Refused.exit_code if _without_room(error) else BadValue.exit_code
        _complain(BadValue(f"{error.filename or 'standard output'}: {error.strerror or error}"), as_json, code)
        silence()
    except KeyboardInterrupt as stop:
        _complain(Interrupted(str(stop) or "interrupted"), as_json)
        code = Interrupted.exit_code
    except SystemExit as stop:  # argparse's own, after --help
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
    return code


def _importer(error: ModuleNotFoundError) -> str:
    """'module (file, line)' of the import that failed."""
    frames = [pair for pair in traceback.walk_tb(error.__traceback__) if "importlib" not in pair[0].f_code.co_filename]
    frame, line = frames[-1]
    return f"{frame.f_globals.get('__name__', '?')} ({frame.f_code.co_filename}, line {line})"


def _without_room(error: BaseException) -> bool:
    """Whether a full disk is behind the error: the call was right, so that the same one may succeed later."""
    chain: BaseException | None = error
    while chain is not None and not (isinstance(chain, OSError) and chain.errno in NO_ROOM):
        chain = chain.__cause__ or chain.__context__
    return chain is not None


def _flushed(code: int) -> int:
    """Flushes the output and returns `code`, also if the reader is gone. Raises OSError if there was no room for the output."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        silence()
    return code


def verbs() -> tuple[str, ...]:
    """The verbs, in the order of the help text; found by looking, not by importing."""
    modules = (path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))
    # a module ends in an underscore if its verb is a Python keyword: import_.py is `mpbridge import`
    names = {name.rstrip("_").replace("_", "-") for name in modules if name not in NOT_VERBS} | BESIDE.keys()
    return tuple(dict.fromkeys((*DAY, *(verb for group in PARTS.values() for verb in group), *sorted(names))))


def verb_of(verb: str) -> Any:
    """What has SUMMARY, ARGUMENTS and run of a verb: its module, or a class in that of another."""
    home = BESIDE.get(verb, verb).replace("-", "_")
    module = importlib.import_module(f"mpbridge.cli.{home}{'_' * iskeyword(home)}")
    return getattr(module, verb.title().replace("-", "") + "Verb") if verb in BESIDE else module


def _dispatch(arguments: list[str]) -> int:
    known = verbs()
    if arguments[:1] == ["help"] and len(arguments) > 2:
        raise BadValue(f"mpbridge help {' '.join(arguments[1:])}: expected one command, as in mpbridge help train")
    if arguments == ["help", "--all"]:
        print_line(_help(known, every=True))
        return 0
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print_line(_help(known))
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print_line(f"mpbridge {VERSION}")
        return 0
    if arguments[0] == "--json" and len(arguments) > 1:  # before the verb too
        arguments = [arguments[1], "--json", *arguments[2:]]
    verb, *rest = arguments
    if verb in ALIASES:
        now, *given = ALIASES[verb]
        warn(f"mpbridge {verb} is now mpbridge {now}")
        verb, rest = now, [*given, *rest]
    if verb not in known:
        raise UnknownName("command", verb, known)
    if verb not in FOREIGN:  # another program's warnings are its own
        without_chatter()
    if verb not in FOREIGN and "" in rest:  # '' as a path is the current folder, as a value nothing
        before = " ".join(["mpbridge", verb, *rest[: rest.index("")]])
        raise BadValue(f"{before} '': an empty argument, expected a value (a variable of the shell that is not set?)")
    # intermixed: key=value may come before, between and after options
    args = parser_of(verb).parse_intermixed_args(rest if verb in FOREIGN else with_way(rest))
    found = verb_of(verb)
    if verb not in FOREIGN and (faults := too_small(args, found.ARGUMENTS)):
        raise BadValue("; ".join(faults))
    return int(found.run(args))


PROCESSES = frozenset({
    "--gpus", "--num-gpus", "--n-gpus", "--ngpus", "--nproc", "--nproc-per-node", "--world", "--processes", "--devices",
})  # fmt: skip
"""What other programs call --world-size."""


class Interrupted(MpbridgeError):
    """The user's Ctrl-C."""

    exit_code = 130


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """argparse's, at most as wide as the terminal; description and epilog keep their lines, and longer ones are wrapped."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return prose(text, width, indent=indent)

    def _format_usage(self, *args: Any) -> str:
        lines = super()._format_usage(*args).split("\n")
        if max(map(len, lines)) <= self._width:
            return "\n".join(lines)
        # argparse indents the options as far as the command is long
        return "\n".join([lines[0], *(f"    {line.lstrip()}" if line else "" for line in lines[1:])])


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line."""

    quoted: frozenset[str] = frozenset()
    """Options whose value may begin with a dash: a command line in quotes."""

    def parse_intermixed_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Like argparse, but the word after an option in `quoted` is its value even if it begins with a dash."""
        joined: list[str] = []
        for word in sys.argv[1:] if args is None else args:
            if joined and joined[-1] in self.quoted:
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return super().parse_intermixed_args(joined, namespace)

    def error(self, message: str) -> NoReturn:
        """Raises BadValue instead of printing the usage and exiting."""
        message = message.replace(", key=value", "")  # never required, whatever argparse says
        raise BadValue(f"{self.prog}: {message} ({self._meant(message)}mpbridge help {self.prog.partition(' ')[2]})")

    def _meant(self, message: str) -> str:
        """The options that an unknown one in the message was probably meant to be."""
        options = [name for action in self._actions for name in action.option_strings]
        given = re.findall(r"--[\w-]+", message.partition("unrecognized arguments: ")[2])
        found = [
            name
            for word in given
            for name in (("--world-size",) if word in PROCESSES else nearest(word, options))
            if name in options
        ]
        if not found and any(word in PROCESSES for word in given):
            return "torchrun --nproc-per-node N starts processes, launch those of several nodes; "
        return f"nearest: {', '.join(dict.fromkeys(found))}; " if found else ""


def parser_of(verb: str) -> argparse.ArgumentParser:
    """The verb's parser, with its arguments."""
    found = verb_of(verb)
    epilog = getattr(found, "EPILOG", None)
    parser = Parser(prog=f"mpbridge {verb}", description=found.SUMMARY, formatter_class=_Formatter, epilog=epilog)
    add_arguments(parser, found.ARGUMENTS)
    parser.quoted = getattr(found, "QUOTED", frozenset())
    if verb in FOREIGN:
        parser.parse_intermixed_args = parser.parse_args  # type: ignore[method-assign]
    return parser


def with_way(arguments: list[str]) -> list[str]:
    """Joins `--emulate` and its optional word: alone it means 'fast', and a following key=value does not belong to it."""
    out: list[str] = []
    for argument in arguments:
        if out and out[-1] == "--emulate=fast" and argument in ("fast", "te"):
            out[-1] = f"--emulate={argument}"
        else:
            out.append("--emulate=fast" if argument == "--emulate" else argument)
    return out


def _help(known: Sequence[str], *, every: bool = False) -> str:
    others = [verb for verb in known if verb not in DAY and not any(verb in group for group in PARTS.values())]
    groups = {"": DAY} | ({**PARTS, "also": tuple(others)} if every else {})
    head = f"mpbridge {VERSION}: one name decides every precision fact of a megatron-core training run"
    lines = [head, "", "usage: mpbridge COMMAND ..."]
    for title, names in groups.items():
        lines += ["", *([f"{title}:"] if title else [])]
        lines += hanging([(f"  {verb}", str(verb_of(verb).SUMMARY)) for verb in names], columns_here())
    lines += [] if every else ["", f"more: mpbridge help --all ({len(known) - len(DAY)} more commands)"]
    codes = "Exit codes: 0 done, 1 the answer is no, 2 misuse, 3 training stopped early."
    return "\n".join([*lines, "", f"For details: mpbridge help COMMAND. {codes}"])


def _complain(error: MpbridgeError, as_json: bool, code: int | None = None) -> None:
    """Prints the error on stderr: a line for each fault, or as JSON, one object on one line."""
    text, rank = str(error), os.environ.get("RANK", "0")
    if as_json:
        said = {"message": error.subject, "faults": list(error.faults)} if isinstance(error, Contradiction) else {}
        data = {"error": type(error).__name__, "exit_code": code or error.exit_code, "message": text} | said
        text = json.dumps(data | ({"rank": rank} if rank != "0" else {}))
    elif rank != "0":  # all processes of a job fail in the same way: rank 0 prints the full error, the others a line
        text = f"rank {rank}: {text.splitlines()[0] if text else ''}"
    warn(text)
