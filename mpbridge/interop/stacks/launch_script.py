"""Reads from a launch script's text the arguments that it passes to its Python program. Nothing is executed and no pattern of the script is matched.

Followed are assignments, arrays, expansions of variables with their defaults, and commands inside strings. Everything else is named with its line: a
branch, a loop, a function, a sourced file or a command substitution is not followed, and an option that depends on one is reported as not decided,
never taken at its default. The arguments themselves (`--args`, a log's dump, a checkpoint) say the same exactly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpbridge.common.errors import BadValue, cut
from mpbridge.common.files import LIMITS
from mpbridge.interop.stacks.shell_words import ASSIGNMENT, Command, commands, unit_end

LIMIT = LIMITS["launch script"]
GAP = "\0"
"""Stands in a word for what only running the script would tell."""
_OPTIONS = "\0\0"
"""Stands for options of which only running tells whether they are given: no option's value."""
MOST_SHOWN_OF_BRANCH = 1000
"""Characters of what a branch sets: an option of precision among them is what decides."""
NO_PROGRAM = "no command starts a Python program here: all options in the text are read"
_NESTED = "its expansions are nested too deeply"
_OPEN = re.compile(rf'"[^"\n]*{GAP}[^"\n]*"|[^\s,:"{{}}\[\]]*{GAP}[^\s,"{{}}\[\]]*')
"""A value in a here-document that only running tells: read as DeepSpeed's word for a value that something else fills in."""
_OPENS = frozenset({"if", "for", "while", "until", "select", "case", "function", "{"})
_CLOSES = frozenset({"fi", "done", "esac", "}"})
_GOES_ON = frozenset({"then", "do", "else", "elif", "!", "time"})
_DECLARES = frozenset({"export", "declare", "local", "readonly", "typeset"})
_HARMLESS = frozenset({"cd", "mkdir", "echo", "set", "pushd", "popd", "module", "ulimit", "true", ":", *_DECLARES})
"""Commands whose success nobody doubts: what follows them behind && is read."""
_EXPANSION = re.compile(r"\$(?:(\w+|[@*])|\{(\w+|[@*])(\[[@*]\])?(?:(:?[-=])(.*))?\})", re.DOTALL)
_UNQUOTED = re.compile(r"[^'\"$]*")
_BRACES = re.compile(r"\{[^{}]*\}")


@dataclass
class LaunchScript:
    """The result."""

    words: list[str] = field(default_factory=list)
    """The expanded words after the program's name in the command that starts it."""
    program: list[str] = field(default_factory=list)
    """The words before them, up to the program's name: the launcher, its options and the program."""
    notes: list[str] = field(default_factory=list)
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
    notes = [*dict.fromkeys([*script.notes, *notes]), *script.unused(text, "the script")]
    last = text.rstrip().rpartition("\n")[2].strip()
    if (len(last) - len(last.rstrip("\\"))) % 2 and not last.startswith("#"):
        notes.append("the last line ends in a line continuation: read as whole, but the arguments after it are missing")
    documents = {file: _OPEN.sub('"auto"', text) for file, text in script.documents.items()}
    return LaunchScript(words=words, program=program, notes=notes, documents=documents)


def read_words(text: str, env: Mapping[str, str]) -> LaunchScript:
    """The words of one command line, with its command or without. Raises BadValue for unclosed quotes."""
    script, notes = _Script(env, None), list[str]()
    try:
        found = list(commands(text.strip().replace("\n", " ")))
        if len(found) > 1 or any(command.after for command in found):
            raise BadValue("expected the arguments of one command, without ; | & and parentheses")
        words = script.expanded(found[0].words, notes) if found else []
    except (BadValue, RecursionError) as error:
        why = error if isinstance(error, BadValue) else _NESTED
        raise BadValue(f"--args cannot be split into words: {why}") from None
    program, words = (None if words[:1] and words[0].startswith("-") else _split(words)) or ([], words)
    words = _decided(words, notes)
    notes = [*_grouped(notes), *script.unused(text, "the text of --args")]
    return LaunchScript(words=words, program=program, notes=notes)


@dataclass(frozen=True, slots=True)
class _Value:
    words: tuple[str, ...] = ("",)
    array: bool = False
    notes: tuple[str, ...] = ()
    """What its content depends on that is not followed."""


def _entered(command: Command, blocks: list[tuple[str, int]]) -> tuple[list[str], str]:
    """(a command's words without the keywords around it, why it may not be run). blocks: kind and line of those that are open, which it opens and closes."""
    words = list(command.words)
    while words and words[0] in (*_OPENS, *_CLOSES, *_GOES_ON):
        word = words.pop(0)
        if word in _OPENS:
            function = word == "function" or (word == "{" and command.before == ")")
            blocks.append(("a function" if function else "" if word == "{" else f"`{word}`", command.line))
            words = [] if word in ("for", "case", "select") else words[2:] if word == "function" else words
        elif word in _CLOSES and blocks:
            blocks.pop()
    pattern = command.after == ")" and blocks and blocks[-1][0] == "`case`"
    # braces alone decide nothing
    where = next((f"stands in {kind} of line {line}" for kind, line in reversed(blocks) if kind), "")
    if command.after == "(":
        words = []  # a function's name is no command
        blocks.append(("`(`", command.line))
    elif command.after == ")" and blocks and not pattern:
        blocks.pop()
    return ([] if pattern else words), where


class _Script:
    """A script's variables, and the commands that it runs."""

    def __init__(self, env: Mapping[str, str], path: Path | None) -> None:
        self.env, self.asked = env, set[str]()
        self.values = {name: _Value((value,)) for name, value in env.items()}
        self.values |= {"PWD": _Value((".",)), "0": _Value((str(path) if path else "script.sh",))}
        self.notes: list[str] = []
        self.documents: dict[str, str] = {}
        self.started: list[tuple[list[str], list[str], list[str]]] = []
        """(program, words, notes) of each command that starts a Python program."""
        self.other: list[list[str]] = []
        self.moved = False
        """Whether the script changes its own arguments."""
        self.left, self.depth = LIMIT.steps, 0

    def spend(self, words: Iterable[str], notes: int = 0) -> None:
        """Pays for a text that is followed, or for words that are copied with so many notes. Raises BadValue once nothing is left.

        Without it a line of fifty characters that evaluates itself twice has no end, and copies of variables fill the memory.
        """
        self.left -= notes + sum(len(word) + 1 for word in words)
        if self.left < 0:
            raise BadValue(f"the script's values have more than {LIMIT.steps:,} characters once they are expanded")

    def expanded(self, words: Iterable[str], notes: list[str]) -> list[str]:
        """The words that a command gets; what they depend on is added to `notes`."""
        made = list[str]()
        for word in words:
            unquoted = _UNQUOTED.match(word)
            if any("," in one or ".." in one for one in _BRACES.findall(unquoted[0] if unquoted else "")):
                made.append(GAP)
                notes.append(f"{cut(word)} is not expanded: not decided")
            else:
                made += self.one(word, notes, split=True)
        return made

    def one(self, text: str, notes: list[str], *, split: bool = False, quoted: bool = False) -> list[str]:
        """The words of one written word. split: whether unquoted values are split at blanks. quoted: as inside double quotes."""
        made, something, at = [""], quoted, 0
        while at < len(text):
            end = unit_end(text, at, 0, '"' if quoted else "")
            piece, at = text[at:end], end
            if piece.startswith("\\"):
                values = [piece[1:] if not quoted or piece[1:] in '$`"\\' else piece]
            elif piece.startswith("'") and not quoted:
                values = [piece[1:-1]]
            elif piece.startswith('"') and not quoted:
                values = self.one(piece[1:-1], notes, quoted=True)
            elif piece.startswith(("$", "`", "<(", ">(")) and len(piece) > 1:
                values, array = self.value(piece, notes)
                if quoted and array and piece == text:
                    return values
                if split and not quoted:
                    apart = something and bool(values) and values[0][:1].isspace()
                    values = [*([""] if apart else ()), *(part for value in values for part in value.split())]
                elif not array:
                    values = [" ".join(values)]
            else:
                values = [piece]
            if values:
                made, something = [*made[:-1], made[-1] + values[0], *values[1:]], True
        return made if something else []

    def value(self, piece: str, notes: list[str]) -> tuple[list[str], bool]:
        """(values, whether they are words of their own in quotes) of `$NAME`, `${...}`, `$(...)`."""
        found = _EXPANSION.fullmatch(piece)
        name = (found[1] or found[2]) if found else ""
        if found is None or (self.moved and not name.isidentifier()):
            how = "run" if piece.startswith(("`", "$(", "<(", ">(")) else "followed"
            notes.append(f"{cut(' '.join(piece.split()))} is not {how}: not decided")
            return [GAP], False
        self.asked.add(name)
        if name in "@*":
            numbered = [self.env[n] for n in sorted(filter(str.isdecimal, self.env), key=int) if int(n)]
            notes += [] if numbered else ['"$@" has no values: assumed empty (--env 1=...)']
            return numbered, True
        held = self.values.get(name)
        if found[4] and (held is None or (":" in found[4] and not any(held.words))):
            own = list[str]()
            made = self.one(found[5], own, quoted=True)
            if "=" in found[4]:
                self.values[name] = _Value(tuple(made), notes=tuple(own))
            notes += own
            return made, False
        if held is None:
            notes.append(f"${name} has no value: assumed empty (--env {name}=...)")
            return [""], False
        words = held.words if found[3] or not held.array else held.words[:1]
        self.spend(words, len(held.notes))
        notes += held.notes
        return list(words), found[3] == "[@]"

    def follow(self, text: str) -> None:
        """Follows a text's commands in order, until one that ends the script."""
        if self.depth > 20:
            self.notes.append("commands in strings are nested too deeply: not read")
            return
        self.depth += 1
        blocks, previous, doubt = list[tuple[str, int]](), "", False
        try:
            self.spend([text])
            for command in commands(text):
                if command.document is not None:
                    self.write(command.target, command.document, command.line, raw=command.raw)
                words, where = _entered(command, blocks)
                if not words:
                    continue
                chained = command.before in ("&&", "||")
                doubt = chained and (doubt or command.before == "||" or previous not in _HARMLESS)
                where = where or (f"depends on `{previous}`" if doubt else "")
                previous = self.run(words, where, command.line)
                if previous == "exit" and not where:
                    break
        except (BadValue, RecursionError) as error:
            self.notes.append(f"{error if isinstance(error, BadValue) else _NESTED}: what follows is not read")
        self.depth -= 1
        self.notes += [f"{kind} of line {line} is never closed" for kind, line in blocks if kind and kind != "`(`"]

    def write(self, target: str, document: str, line: int, *, raw: bool) -> None:
        """Keeps a here-document that is written to a file."""
        self.notes.append(f"line {line}: a here-document is not read")
        if target:
            self.spend([document])
            text = document if raw else " ".join(self.one(document, [], quoted=True))
            self.documents["".join(self.one(target, []))] = text

    def run(self, words: list[str], where: str, line: int) -> str:
        """Follows one command. where: the reason why it may not be run; empty: it is run. Returns its name."""
        first = next((at for at, word in enumerate(words) if not ASSIGNMENT.match(word)), None)
        if first is None or words[first] in _DECLARES:
            for word in filter(ASSIGNMENT.match, words):
                self.assign(word, where, line)
            return ":"
        notes: list[str] = []
        made = self.expanded(words[first:], notes)  # variables before it are those of the command alone
        if where:
            notes.append(f"line {line}: the command {where}, which is not followed: read as if it ran")
        text = next((word for word in made if " " in word and (".py" in word or " -m " in word)), None)
        split = _split(made)
        if made[:1] in (["source"], ["."]):
            shown = cut(" ".join(made).replace(GAP, "..."))
            self.notes.append(f"line {line}: `{shown}` is not read: its variables are unknown (--env NAME=...)")
        elif made[:1] == ["eval"]:
            self.inner(" ".join(made[1:]), notes)
        elif split is not None and " " not in split[0][-1]:
            self.started.append((*split, notes))
        elif text is not None:
            self.inner(text, notes)
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
        name, plus, written = ASSIGNMENT.split(word, maxsplit=1)[1:]
        adds, array, notes = bool(plus), written.startswith("("), list[str]()
        old = self.values.get(name, _Value())
        if array:
            words = self.expanded((one for command in commands(written[1:-1]) for one in command.words), notes)
        else:
            words = [" ".join(self.one(written, notes))]  # as a shell joins a quoted array's words in an assignment
        self.spend((*words, *old.words), len(notes) + len(old.notes))
        if where:
            adds = adds or bool(re.search(rf"\$\{{?{name}\b", written))  # before its own value or behind it
            made, held = " ".join(words), " ".join(old.words) if adds else ""
            shown = cut(made.replace(held, "", bool(held)).strip().replace(GAP, "..."), MOST_SHOWN_OF_BRANCH)
            said = f"line {line}: {name}{'+' if adds else ''}={shown} {where}, which is not followed: not decided"
            if "`(`" not in where:  # a subshell's variables end with it
                unknown = _OPTIONS if words[:1] and words[0].startswith("-") else GAP
                self.values[name] = _Value(old.words if adds else (unknown,), old.array, (*old.notes, said))
            return
        if adds:
            words = [*old.words, *words] if array or old.array else ["".join((*old.words, *words))]
            notes = [*old.notes, *notes]
        elif name in self.env and name not in self.asked:
            self.notes.append(f"--env {name}={cut(self.env[name])} has no effect: the script sets {name}")
        self.values[name] = _Value(tuple(words), array or (adds and old.array), tuple(dict.fromkeys(notes)))

    def chosen(self) -> tuple[list[str], list[str], list[str]]:
        """The words up to the program's name and those after it in the command with the most options, and notes on them."""
        if self.started:
            program, words, notes = max(reversed(self.started), key=lambda one: _options(one[1]))
            others = {tuple(rest) for _, rest, _ in self.started if _options(rest)} - {tuple(words)}
            several = f"{len(others) + 1} commands start a program with options: the one with the most options is read"
            notes = [*([several] if others else ()), *notes]
        else:
            program, notes = [], [NO_PROGRAM]
            held = [value for name, value in self.values.items() if name not in ("PWD", "0")]
            words = [word for value in held for word in _again(value.words)]
            notes += [note for value in held for note in value.notes]
            if not _options(words):  # variables come first, since a job submission has options of its own
                words = [word for command in self.other for word in _again(command)]
            words = words if _options(words) else []
            notes = notes[not words :]
        words = _decided(words, notes)
        return [word.replace(GAP, "") for word in program], words, _grouped(notes)

    def unused(self, text: str, what: str) -> list[str]:
        """A note for each given variable that a text nowhere names."""
        names = [name for name in sorted(self.env) if not name.isdigit() and name not in self.asked]
        unused = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)]
        return [f"--env {name}: {what} does not use it" for name in unused]


def _decided(words: list[str], notes: list[str]) -> list[str]:
    """Words without those that only running would tell, nor the options whose values those are, which are noted."""
    kept = list[str]()
    for word in words:
        if GAP not in word:
            kept.append(word)
        elif _OPTIONS not in word:
            before = bool(kept) and kept[-1].startswith("--") and "=" not in kept[-1]
            option = word.partition("=")[0] if word.startswith("--") else kept.pop() if before else ""
            if option and GAP not in option:
                notes.append(f"{cut(option)}: its value is known only when the script runs: not decided")
    return kept


def _grouped(said: list[str]) -> list[str]:
    """Each line once, with one line for all variables without a value where there are more than four."""
    said = list(dict.fromkeys(said))
    unset = [line for line in said if " has no value: " in line]
    if len(unset) <= 4:
        return said
    named = ", ".join(line.partition(" ")[0] for line in unset)
    rest = [line for line in said if line not in unset]
    return [*rest, f"{named} have no value: assumed empty (--env NAME=...)"]


def _split(command: list[str]) -> tuple[list[str], list[str]] | None:
    """The words up to `x.py` or `-m module`, and those after it; None if neither is present."""
    starts = ("python", "torchrun", "accelerate", "deepspeed")
    python = next((at for at, word in enumerate(command) if Path(word).name.startswith(starts)), len(command))
    at = next((at for at, word in enumerate(command) if word.endswith(".py")), None)
    if at is None and "-m" in command[python:-1]:
        at = command.index("-m", python) + 1
    return None if at is None else (command[: at + 1], command[at + 1 :])


def _options(words: Iterable[str]) -> int:
    return sum(word.startswith("--") for word in words)


def _again(values: Iterable[str]) -> list[str]:
    """The words of values that hold options, which the shell splits again."""
    split = (value.split() if value.lstrip().startswith("-") or " --" in value else [value] for value in values)
    return [word for words in split for word in words]
