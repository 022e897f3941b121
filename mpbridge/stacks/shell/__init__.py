"""Reads from a shell script's text the arguments that it passes to its Python program; nothing is executed.

The script is followed as in bash, with the given variables: assignments, arrays, expansions, branches, loops, functions,
sourced files in the same folder, here-documents, and commands inside strings. What is known only at run time (`$(nproc)`, whether a file
exists, a command's exit code) counts as empty or false, with a note for each such assumption that affects the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpbridge.errors import BadValue
from mpbridge.stacks.shell.commands import Follower
from mpbridge.stacks.shell.fields import bare, clean, unknown_word
from mpbridge.stacks.shell.syntax import Command, parse
from mpbridge.stacks.shell.values import NO_VALUE, ShellValue, Values, texts

MOST = 400_000
"""Maximum length of a script; real launch scripts are a hundred times smaller."""


@dataclass
class LaunchScript:
    """The result."""

    words: list[str] = field(default_factory=list)
    """The expanded words after the program's name in the command that starts it."""
    program: list[str] = field(default_factory=list)
    """The words before them, up to the program's name: the launcher, its options and the program."""
    notes: list[str] = field(default_factory=list)
    """What was skipped, and what was assumed."""


def read_script(text: str, env: Mapping[str, str], path: Path | None = None) -> LaunchScript:
    """The arguments in a launch script. Raises BadValue for text that is not a script.

    env: values of external variables; '1', '2', ... are the script's arguments. path: the script's, to find files that it sources.
    """
    if len(text) > MOST or "\0" in text:
        raise BadValue("this is not a launch script: it exceeds 400,000 characters or contains NUL bytes")
    follower = _follower(env, path)
    follower.follow(parse(clean(text).replace("\r\n", "\n"), follower.notes))
    follower.said_of_functions()
    program, words, said = _chosen(follower)
    notes = grouped(list(dict.fromkeys([*follower.notes, *said])))
    if _continued(text):
        notes.append("the last line ends in a line continuation: read as whole, but the arguments after it are missing")
    return LaunchScript(words=words, program=program, notes=[*notes, *_unused(follower, text, "the script")])


def _unused(follower: Follower, text: str, what: str) -> list[str]:
    """A note for each given variable that a text nowhere names, nor a file that it sources asks for."""
    names = [name for name in sorted(follower.given) if not name.isdigit() and name not in follower.values.asked]
    return [f"--env {name}: {what} does not use it" for name in names if not re.search(rf"\b{re.escape(name)}\b", text)]


def _continued(text: str) -> bool:
    """Whether a text breaks off after a line continuation."""
    last = text.rstrip().rpartition("\n")[2].strip()
    return (len(last) - len(last.rstrip("\\"))) % 2 == 1 and not last.startswith("#")


def read_words(text: str, env: Mapping[str, str]) -> LaunchScript:
    """The words of one command line, with its command or without. Raises BadValue for unclosed quotes."""
    follower = _follower(env, None)
    made = parse(f": {clean(text)}", follower.notes)
    if follower.notes:
        fault = follower.notes[0].partition(": assumed to end")[
            0
        ]  # a script is read all the same, one command line is not
        raise BadValue(f"--args cannot be split into words: {fault}")
    if len(made) != 1 or not isinstance(made[0], Command):
        raise BadValue(
            "--args cannot be split into words: expected the arguments of one command, without ; | & and parentheses"
        )
    words = [word for raw in made[0].words[1:] for word in follower.values.fields(raw)]
    program, rest = (None if words[:1] and words[0].startswith("-") else _split(words)) or ([], words)
    notes = [*_said(follower, words), *_unused(follower, text, "the text of --args")]
    return LaunchScript(words=_known(rest), program=_known(program), notes=notes)


def _follower(env: Mapping[str, str], path: Path | None) -> Follower:
    positional: list[str] = []
    while str(len(positional) + 1) in env:
        positional.append(env[str(len(positional) + 1)])
    # a script is started in its own folder unless the variable says otherwise
    variables: dict[str, ShellValue] = {"PWD": "." if path is None else str(path.parent)}
    variables |= {name: clean(value) for name, value in env.items() if not name.isdigit()}
    values = Values(
        variables=variables, positional=[clean(one) for one in positional], script="" if path is None else str(path)
    )
    return Follower(values, given=frozenset(env), folder=None if path is None else path.parent)


def _chosen(follower: Follower) -> tuple[list[str], list[str], list[str]]:
    """The words up to the program's name and those after it in the command with the most options, and notes on them."""
    started = [both for command in follower.commands if (both := _split(command)) is not None]
    if started:
        program, words, said = _of_programs(started)
    else:
        program, (words, said) = [], _of_text(follower)
    told = [text for word in words for text in follower.values.told(word)]
    return _known(program), _known(words), [*said, *told]


def _known(words: list[str]) -> list[str]:
    """Words without their marks; those that only running would tell are dropped."""
    return [bare(word) for word in words if not unknown_word(word)]


def _of_programs(started: list[tuple[list[str], list[str]]]) -> tuple[list[str], list[str], list[str]]:
    """The words of the program with the most options (the last of several), and notes on the others."""
    program, words = max(reversed(started), key=lambda both: _options(both[1]))
    others = {tuple(map(bare, rest)) for _, rest in started if _options(rest)} - {tuple(map(bare, words))}
    if not others:
        return program, words, []
    note = f"{len(others) + 1} commands start a program with options: the one with the most options is read"
    return program, words, [note]


def _of_text(follower: Follower) -> tuple[list[str], list[str]]:
    """The options in variables or commands of a text that starts no program, and notes on that."""
    held = [value for name, value in follower.values.variables.items() if name not in ("PWD", "?")]
    pieces = [one for value in held for one in texts(value)]
    if not any("--" in one for one in pieces):  # variables come first, since a job submission has options of its own
        pieces = [word for command in follower.commands for word in command]
    words = [part for piece in pieces for part in _again(piece)] if any("--" in piece for piece in pieces) else []
    if not any(words):
        return words, []
    return words, ["no command starts a Python program here: all options in the text are read"]


def _said(follower: Follower, words: list[str]) -> list[str]:
    """The notes on the marks in words; many variables share a line."""
    said = list(dict.fromkeys(text for word in words for text in follower.values.told(word)))
    return grouped(said)


def grouped(said: list[str]) -> list[str]:
    """Lines of marks, with one line for all variables without a value where there are more than four."""
    unset = [found[1] for line in said if (found := NO_VALUE.match(line))]
    if len(unset) <= 4:
        return said
    rest = [line for line in said if not NO_VALUE.match(line)]
    return [*rest, f"{', '.join(unset)} have no value: assumed empty (--env NAME=...)"]


def _split(command: list[str]) -> tuple[list[str], list[str]] | None:
    """The words up to `x.py` or `-m module`, and those after it; None if neither is present."""
    plain = [bare(word) for word in command]
    at = next((at for at, word in enumerate(plain) if word.endswith(".py")), None)
    if at is None:
        found = (at + 1 for at, word in enumerate(plain[:-1]) if word == "-m" and at and _is_python(plain[:at]))
        at = next(found, None)
    return None if at is None else (command[: at + 1], command[at + 1 :])


def _is_python(words: list[str]) -> bool:
    return any(Path(word).name.startswith(("python", "torchrun", "accelerate", "deepspeed")) for word in words)


def _options(words: list[str]) -> int:
    return sum(word.startswith("--") for word in words)


def _again(value: str) -> list[str]:
    """The words of an unquoted expansion, which the shell splits again."""
    return value.split() if not bare(value) or bare(value).lstrip().startswith("-") or " --" in value else [value]
