"""Reads from a launch script's text the arguments that it passes to its Python program. Nothing is executed and no pattern of the script is matched.

Followed are assignments, arrays, expansions of variables with their defaults, and commands inside strings. Everything else is named with its line: a
branch, a loop, a function, a sourced file or a command substitution is not followed, and an option that depends on one is reported as not decided,
never taken at its default. The arguments themselves (`--args`, a log's dump, a checkpoint) say the same exactly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpbridge.common.errors import BadValue, cut
from mpbridge.interop.stacks.shell_words import ASSIGNMENT, GAP, LIMIT, Command, Expansions, Value

_OPTIONS = "\0\0"
"""Stands for options of which only running tells whether they are given: no option's value."""
_OPEN = re.compile(rf'"[^"\n]*{GAP}[^"\n]*"|[^\s,:"{{}}\[\]]*{GAP}[^\s,"{{}}\[\]]*')
"""A value in a here-document that only running tells: read as DeepSpeed's word for a value that something else fills in."""
_NESTED = "its expansions are nested too deeply"
_OPENS = frozenset({"if", "for", "while", "until", "select", "case", "{"})
_CLOSES = frozenset({"fi", "done", "esac", "}"})
_GOES_ON = frozenset({"then", "do", "else", "elif", "!", "time"})
_DECLARES = frozenset({"export", "declare", "local", "readonly", "typeset"})
_HARMLESS = frozenset({"cd", "mkdir", "echo", "set", "pushd", "popd", "module", "ulimit", "true", ":", *_DECLARES})
"""Commands whose success nobody doubts: what follows them behind && is read."""


@dataclass
class LaunchScript:
    """The result."""

    words: list[str] = field(default_factory=list)
    """The expanded words after the program's name in the command that starts it."""
    program: list[str] = field(default_factory=list)
    """The words before them, up to the program's name: the launcher, its options and the program."""
    notes: list[str] = field(default_factory=list)
    """What was not followed, and what was assumed."""
    documents: Mapping[str, str] = field(default_factory=dict)
    """File -> the here-document that the script writes to it, with its variables expanded."""


def read_script(text: str, env: Mapping[str, str], path: Path | None = None) -> LaunchScript:
    """The arguments in a launch script. Raises BadValue for text that is not a script.

    env: values of external variables; '1', '2', ... are the script's arguments. path: the script's, for $0.
    """
    if len(text) > LIMIT.size or "\0" in text:
        raise BadValue(f"this is not a launch script: it exceeds {LIMIT.size:,} characters or contains NUL bytes")
    script = _Script(env, path)
    script.follow(text.replace("\r\n", "\n"))
    program, words, notes = script.chosen()
    found = LaunchScript(
        words=words,
        program=program,
        notes=[*dict.fromkeys([*script.notes, *notes]), *script.unused(text, "the script")],
        documents={file: _OPEN.sub('"auto"', text) for file, text in script.documents.items()},
    )
    last = text.rstrip().rpartition("\n")[2].strip()
    half = "the last line ends in a line continuation: read as whole, but the arguments after it are missing"
    found.notes += [half] if (len(last) - len(last.rstrip("\\"))) % 2 and not last.startswith("#") else []
    return found


def read_words(text: str, env: Mapping[str, str]) -> LaunchScript:
    """The words of one command line, with its command or without. Raises BadValue for unclosed quotes."""
    script = _Script(env, None)
    try:
        commands = list(script.commands(text.strip().replace("\n", " ")))
    except BadValue as error:
        raise BadValue(f"--args cannot be split into words: {error}") from None
    if len(commands) > 1 or any(command.after for command in commands):
        raise BadValue(
            "--args cannot be split into words: expected the arguments of one command, without ; | & and parentheses"
        )
    try:
        words, notes = script.expanded(commands[0].words) if commands else ([], [])
    except RecursionError:
        raise BadValue(f"--args cannot be split into words: {_NESTED}") from None
    program, rest = (None if words[:1] and words[0].startswith("-") else _split(words)) or ([], words)
    rest, undecided = _decided(rest)
    return LaunchScript(
        words=rest, program=program, notes=[*_grouped([*notes, *undecided]), *script.unused(text, "the text of --args")]
    )


MOST_SHOWN_OF_BRANCH = 1000
"""Characters of what a branch sets: an option of precision among them is what decides."""
NO_PROGRAM = "no command starts a Python program here: all options in the text are read"


class _Blocks:
    """The branches, loops, functions and groups around a command."""

    def __init__(self) -> None:
        self.open: list[tuple[str, int]] = []
        self.function = False

    def enter(self, command: Command) -> list[str]:
        """The words of a command without the keywords around it; none for what only opens or closes a block."""
        words = list(command.words)
        while words and words[0] in (*_OPENS, *_CLOSES, *_GOES_ON, "function"):
            word = words.pop(0)
            if word == "function":
                words, self.function = words[1:], True
            elif word in _OPENS:
                self.open.append(("a function" if self.function else f"`{word}`", command.line))
                self.function = False
                words = [] if word in ("for", "case", "select") else words
            elif word in _CLOSES and self.open:
                self.open.pop()
        if command.after == "(":
            if words and not ASSIGNMENT.match(words[0]):
                self.function, words = True, []
            else:
                self.open.append(("`(`", command.line))
        elif command.after == ")":
            if self.open and self.open[-1][0] == "`(`":
                self.open.pop()
                return words if self.inside() else []
            if self.function or (self.open and self.open[-1][0] == "`case`"):
                return []
        return words

    def inside(self) -> str:
        """Which of them decide whether a command is run; empty: none. Braces alone decide nothing."""
        deciding = next((one for one in reversed(self.open) if one[0] != "`{`"), None)
        return f"stands in {deciding[0]} of line {deciding[1]}" if deciding else ""


class _Script(Expansions):
    def __init__(self, env: Mapping[str, str], path: Path | None) -> None:
        super().__init__(env, path)
        self.started: list[tuple[list[str], list[str], list[str]]] = []
        """(program, words, notes) of each command that starts a Python program."""
        self.other: list[list[str]] = []
        self.depth = 0

    # -- following ----------------------------------------------------------------------------------------------------------

    def follow(self, text: str) -> None:
        """Follows a text's commands in order, until one that ends the script."""
        if self.depth > 20:
            self.notes.append("commands in strings are nested too deeply: not read")
            return
        self.depth += 1
        blocks = _Blocks()
        previous, doubt = "", False
        try:
            self.spend([text])
            for command in self.commands(text):
                words = blocks.enter(command)
                if not words:
                    continue
                chained = command.before in ("&&", "||")
                doubt = chained and (doubt or command.before == "||" or previous not in _HARMLESS)
                where = blocks.inside() or (f"depends on `{previous}`" if doubt else "")
                previous = self.run(words, where, command.line)
                if previous == "exit" and not where:
                    break
        except BadValue as error:
            self.notes.append(f"{error}: what follows is not read")
        except RecursionError:
            self.notes.append(f"{_NESTED}: what follows is not read")
        self.depth -= 1
        self.notes += [f"{kind} of line {line} is never closed" for kind, line in blocks.open if kind != "`(`"]

    def run(self, words: list[str], where: str, line: int) -> str:
        """Follows one command. where: the reason why it may not be run; empty: it is run. Returns its name."""
        name = words[0]
        while words and (ASSIGNMENT.match(words[0]) or words[0] in _DECLARES):
            if words[0] in _DECLARES:
                words = [word for word in words[1:] if not word.startswith("-")]
                if words and not ASSIGNMENT.match(words[0]):
                    return name
                continue
            rest = [word for word in words if not ASSIGNMENT.match(word)]
            if rest and name not in _DECLARES:
                words = rest  # variables of that command alone
                break
            self.assign(words.pop(0), where, line)
        if not words:
            return ":"
        made, notes = self.expanded(words)
        if where:
            notes = [*notes, f"line {line}: the command {where}, which is not followed: read as if it ran"]
        if made[:1] in (["source"], ["."]):
            self.notes.append(
                f"line {line}: `{cut(' '.join(made).replace(GAP, '...'))}` is not read: its variables are unknown (--env NAME=...)"
            )
        elif made[:1] == ["eval"]:
            self.inner(" ".join(made[1:]), notes)
        elif (split := _split(made)) is not None and not any(" " in word for word in split[0][-1:]):
            self.started.append((*split, notes))
        elif any(" " in word and (".py" in word or " -m " in word) for word in made):
            self.inner(next(word for word in made if " " in word and (".py" in word or " -m " in word)), notes)
        elif not where:
            self.other.append(made)
            if made[:1] in (["shift"], ["getopts"], ["read"], ["mapfile"]) or made[:2] == ["set", "--"]:
                self.notes.append(f"line {line}: `{cut(' '.join(made))}` is not followed")
                self.moved = True
        return made[0] if made else ":"

    def inner(self, text: str, notes: list[str]) -> None:
        """Commands in a string, with the values of now."""
        before = len(self.started)
        self.follow(text)
        self.started[before:] = [(program, words, [*notes, *more]) for program, words, more in self.started[before:]]

    def assign(self, word: str, where: str, line: int) -> None:
        """NAME=value, NAME+=value, NAME=(words)."""
        found = ASSIGNMENT.match(word)
        assert found is not None
        name, adds, written = found[1], bool(found[2]), word[found.end() :]
        old = self.values.get(name, Value(("",)))
        array = written.startswith("(")
        if array:
            inside = [one for command in self.commands(written[1:-1]) for one in command.words]
            words, notes = self.expanded(inside)
        else:
            words, notes = self.one(written)
            words = [" ".join(words)]  # the words of an array in quotes, as a shell joins them in an assignment
        self.spend((*words, *old.words), len(notes) + len(old.notes))
        if where:
            adds = adds or bool(re.search(rf"\$\{{?{name}\b", written))  # before its own value or behind it
            made, held = " ".join(words), " ".join(old.words) if adds else ""
            shown = cut(made.replace(held, "", bool(held)).strip().replace(GAP, "..."), MOST_SHOWN_OF_BRANCH)
            text = f"line {line}: {name}{'+' if adds else ''}={shown} {where}, which is not followed: not decided"
            if "`(`" not in where:  # a subshell's variables end with it
                unknown = _OPTIONS if words[:1] and words[0].startswith("-") else GAP
                self.values[name] = Value(old.words if adds else (unknown,), old.array, (*old.notes, text))
            return
        if adds:
            words = [*old.words, *words] if array or old.array else ["".join((*old.words, *words))]
            notes = [*old.notes, *notes]
        given = name in self.env and not adds and name not in self.asked
        if given:
            self.notes.append(f"--env {name}={cut(self.env[name])} has no effect: the script sets {name}")
        self.values[name] = Value(tuple(words), array or (adds and old.array), tuple(dict.fromkeys(notes)))

    # -- the answer ---------------------------------------------------------------------------------------------------------

    def chosen(self) -> tuple[list[str], list[str], list[str]]:
        """The words up to the program's name and those after it in the command with the most options, and notes on them."""
        if self.started:
            program, words, notes = max(reversed(self.started), key=lambda one: _options(one[1]))
            others = {tuple(rest) for _, rest, _ in self.started if _options(rest)} - {tuple(words)}
            several = f"{len(others) + 1} commands start a program with options: the one with the most options is read"
            notes = [several, *notes] if others else notes
        else:
            program, notes = [], [NO_PROGRAM]
            held = [value for name, value in self.values.items() if name not in ("PWD", "0")]
            words = [word for value in held for word in _again(value.words)]
            notes += [note for value in held for note in value.notes]
            if not _options(words):  # variables come first, since a job submission has options of its own
                words = [word for command in self.other for word in _again(tuple(command))]
            words = words if _options(words) else []
            notes = notes[not words :]
        words, undecided = _decided(words)
        return [word.replace(GAP, "") for word in program], words, _grouped([*notes, *undecided])

    def unused(self, text: str, what: str) -> list[str]:
        """A note for each given variable that a text nowhere names."""
        names = [name for name in sorted(self.env) if not name.isdigit() and name not in self.asked]
        return [
            f"--env {name}: {what} does not use it" for name in names if not re.search(rf"\b{re.escape(name)}\b", text)
        ]


def _decided(words: list[str]) -> tuple[list[str], list[str]]:
    """Words without those that only running would tell, nor the options whose values those are; and the names of these options."""
    kept, notes = list[str](), list[str]()
    for word in words:
        if GAP not in word:
            kept.append(word)
            continue
        if _OPTIONS in word:
            continue
        before = bool(kept) and kept[-1].startswith("--") and "=" not in kept[-1]
        option = word.partition("=")[0] if word.startswith("--") else kept.pop() if before else ""
        if option and GAP not in option:
            notes.append(f"{cut(option)}: its value is known only when the script runs: not decided")
    return kept, notes


def _grouped(said: list[str]) -> list[str]:
    """Each line once, with one line for all variables without a value where there are more than four."""
    said = list(dict.fromkeys(said))
    unset = [line.partition(" ")[0] for line in said if " has no value: " in line]
    if len(unset) <= 4:
        return said
    return [
        *(line for line in said if " has no value: " not in line),
        f"{', '.join(unset)} have no value: assumed empty (--env NAME=...)",
    ]


def _split(command: list[str]) -> tuple[list[str], list[str]] | None:
    """The words up to `x.py` or `-m module`, and those after it; None if neither is present."""
    at = next((at for at, word in enumerate(command) if word.endswith(".py")), None)
    if at is None:
        found = (at + 1 for at, word in enumerate(command[:-1]) if word == "-m" and at and _is_python(command[:at]))
        at = next(found, None)
    return None if at is None else (command[: at + 1], command[at + 1 :])


def _is_python(words: list[str]) -> bool:
    return any(Path(word).name.startswith(("python", "torchrun", "accelerate", "deepspeed")) for word in words)


def _options(words: list[str]) -> int:
    return sum(word.startswith("--") for word in words)


def _again(values: tuple[str, ...]) -> list[str]:
    """The words of values that hold options, which the shell splits again."""
    split = (value.split() if value.lstrip().startswith("-") or " --" in value else [value] for value in values)
    return [word for words in split for word in words]
