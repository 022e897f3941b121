"""Reads from a launch script's text the arguments that it passes to its Python program. Nothing is executed and no pattern of the script is matched.

Followed are assignments, arrays, expansions of variables with their defaults, and commands inside strings. Everything else is named with its line: a
branch, a loop, a function, a sourced file or a command substitution is not followed, and an option that depends on one is reported as not decided,
never taken at its default. The arguments themselves (`--args`, a log's dump, a checkpoint) say the same exactly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpbridge.common.errors import BadValue, cut
from mpbridge.common.files import LIMITS

_LIMIT = LIMITS["launch script"]
_GAP = "\0"
"""Stands in a word for what only running the script would tell."""
_OPTIONS = "\0\0"
"""Stands for options of which only running tells whether they are given: no option's value."""
_NESTED = "its expansions are nested too deeply"
_OPENS = frozenset({"if", "for", "while", "until", "select", "case", "{"})
_CLOSES = frozenset({"fi", "done", "esac", "}"})
_GOES_ON = frozenset({"then", "do", "else", "elif", "!", "time"})
_DECLARES = frozenset({"export", "declare", "local", "readonly", "typeset"})
_HARMLESS = frozenset({"cd", "mkdir", "echo", "set", "pushd", "popd", "module", "ulimit", "true", ":", *_DECLARES})
"""Commands whose success nobody doubts: what follows them behind && is read."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_UNQUOTED = re.compile(r"[^'\"$]*")
_BRACES = re.compile(r"\{[^{}]*\}")
_OPERATOR = re.compile(r"\n|;;&?|;&|&&|\|\||\|&|[;&|()]")
_REDIRECTION = re.compile(r"\d*(<<<|<<-?|&>>?|>>|[<>]&|>\||[<>])")


@dataclass
class LaunchScript:
    """The result."""

    words: list[str] = field(default_factory=list)
    """The expanded words after the program's name in the command that starts it."""
    program: list[str] = field(default_factory=list)
    """The words before them, up to the program's name: the launcher, its options and the program."""
    notes: list[str] = field(default_factory=list)
    """What was not followed, and what was assumed."""


@dataclass(frozen=True, slots=True)
class _Word:
    """A word as written: quoted parts are (text, True)."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class _Value:
    words: tuple[str, ...] = ("",)
    array: bool = False
    notes: tuple[str, ...] = ()
    """What its content depends on that is not followed."""


def read_script(text: str, env: Mapping[str, str], path: Path | None = None) -> LaunchScript:
    """The arguments in a launch script. Raises BadValue for text that is not a script.

    env: values of external variables; '1', '2', ... are the script's arguments. path: the script's, for $0.
    """
    if len(text) > _LIMIT.size or "\0" in text:
        raise BadValue(f"this is not a launch script: it exceeds {_LIMIT.size:,} characters or contains NUL bytes")
    script = _Script(env, path)
    script.follow(text.replace("\r\n", "\n"))
    program, words, notes = script.chosen()
    found = LaunchScript(
        words=words,
        program=program,
        notes=[*dict.fromkeys([*script.notes, *notes]), *script.unused(text, "the script")],
    )
    last = text.rstrip().rpartition("\n")[2].strip()
    if (len(last) - len(last.rstrip("\\"))) % 2 and not last.startswith("#"):
        found.notes.append(
            "the last line ends in a line continuation: read as whole, but the arguments after it are missing"
        )
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


@dataclass
class _Command:
    words: list[_Word] = field(default_factory=list)
    before: str = ""
    """The operator in front of it."""
    after: str = ""
    line: int = 1


class _Blocks:
    """The branches, loops, functions and groups around a command."""

    def __init__(self) -> None:
        self.open: list[tuple[str, int]] = []
        self.function = False

    def enter(self, command: _Command) -> list[_Word]:
        """The words of a command without the keywords around it; none for what only opens or closes a block."""
        words = list(command.words)
        while words and words[0].text in (*_OPENS, *_CLOSES, *_GOES_ON, "function"):
            word = words.pop(0)
            if word.text == "function":
                words, self.function = words[1:], True
            elif word.text in _OPENS:
                self.open.append(("a function" if self.function else f"`{word.text}`", word.line))
                self.function = False
                words = [] if word.text in ("for", "case", "select") else words
            elif word.text in _CLOSES and self.open:
                self.open.pop()
        if command.after == "(":
            if words and not _ASSIGNMENT.match(words[0].text):
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


class _Script:
    def __init__(self, env: Mapping[str, str], path: Path | None) -> None:
        self.env, self.asked = env, set[str]()
        self.values = {name: _Value((value,)) for name, value in env.items()}
        self.values |= {"PWD": _Value((".",)), "0": _Value((str(path) if path else "script.sh",))}
        self.notes: list[str] = []
        self.started: list[tuple[list[str], list[str], list[str]]] = []
        """(program, words, notes) of each command that starts a Python program."""
        self.other: list[list[str]] = []
        self.depth = 0
        self.left = _LIMIT.steps
        self.moved = False
        """Whether the script changes its own arguments."""

    def spend(self, words: Iterable[str], notes: int = 0) -> None:
        """Pays for a text that is followed, or for words that are copied with so many notes. Raises BadValue once nothing is left.

        Without it a line of fifty characters that evaluates itself twice has no end, and copies of variables fill the memory.
        """
        self.left -= notes + sum(len(word) + 1 for word in words)
        if self.left < 0:
            raise BadValue(f"the script's values have more than {_LIMIT.steps:,} characters once they are expanded")

    # -- splitting ----------------------------------------------------------------------------------------------------------

    def commands(self, text: str) -> Iterator[_Command]:
        """The simple commands of a text. Raises BadValue for a quote or bracket that is never closed."""
        command = _Command()
        for kind, written, line in _tokens(text, self.notes):
            if kind == "word":
                command.words.append(_Word(written, line))
                continue
            command.after = written.strip("\n")
            if command.words or command.after in ("(", ")"):
                yield command
            command = _Command(before=written, line=line + (written == "\n"))

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

    def run(self, words: list[_Word], where: str, line: int) -> str:
        """Follows one command. where: the reason why it may not be run; empty: it is run. Returns its name."""
        name = words[0].text
        while words and (_ASSIGNMENT.match(words[0].text) or words[0].text in _DECLARES):
            if words[0].text in _DECLARES:
                words = [word for word in words[1:] if not word.text.startswith("-")]
                if words and not _ASSIGNMENT.match(words[0].text):
                    return name
                continue
            rest = [word for word in words if not _ASSIGNMENT.match(word.text)]
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
                f"line {line}: `{cut(' '.join(made).replace(_GAP, '...'))}` is not read: its variables are unknown (--env NAME=...)"
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

    def assign(self, word: _Word, where: str, line: int) -> None:
        """NAME=value, NAME+=value, NAME=(words)."""
        found = _ASSIGNMENT.match(word.text)
        assert found is not None
        name, adds, written = found[1], bool(found[2]), word.text[found.end() :]
        old = self.values.get(name, _Value(("",)))
        array = written.startswith("(")
        if array:
            inside = [one for command in self.commands(written[1:-1]) for one in command.words]
            words, notes = self.expanded(inside)
        else:
            words, notes = self.one(written)
            words = ["".join(words)]
        self.spend((*words, *old.words), len(notes) + len(old.notes))
        if where:
            adds = adds or bool(re.match(rf'\(?\s*"?\$\{{?{name}\b', written))
            text = f"line {line}: {name}{'+' if adds else ''}={cut(' '.join(words).replace(_GAP, '...'))} {where}, which is not followed: not decided"
            if "`(`" not in where:  # a subshell's variables end with it
                unknown = _OPTIONS if words[:1] and words[0].startswith("-") else _GAP
                self.values[name] = _Value(old.words if adds else (unknown,), old.array, (*old.notes, text))
            return
        if adds:
            words = [*old.words, *words] if array or old.array else ["".join((*old.words, *words))]
            notes = [*old.notes, *notes]
        given = name in self.env and not adds and name not in self.asked
        if given:
            self.notes.append(f"--env {name}={cut(self.env[name])} has no effect: the script sets {name}")
        self.values[name] = _Value(tuple(words), array or (adds and old.array), tuple(dict.fromkeys(notes)))

    # -- expanding ----------------------------------------------------------------------------------------------------------

    def expanded(self, words: list[_Word]) -> tuple[list[str], list[str]]:
        """The words that a command gets, and what they depend on."""
        made, notes = list[str](), list[str]()
        for word in words:
            found, more = self.one(word.text, split=True)
            if _has_braces(word.text):
                found, more = [_GAP], [f"{cut(word.text)} is not expanded: not decided"]
            made += found
            notes += more
        return made, list(dict.fromkeys(notes))

    def one(self, text: str, *, split: bool = False, quoted: bool = False) -> tuple[list[str], list[str]]:
        """The words of one written word. split: whether unquoted values are split at blanks. quoted: as inside double quotes."""
        done: list[str] = []
        notes: list[str] = []
        current: str | None = "" if quoted else None
        at = 0

        def add(values: list[str], apart: bool) -> None:
            nonlocal current
            for number, value in enumerate(values):
                if number and apart:
                    done.append(current or "")
                    current = value
                else:
                    current = (current or "") + (" " if number else "") + value

        while at < len(text):
            char = text[at]
            end = _piece(text, at, 0, quoted=quoted)
            piece = text[at:end]
            if char == "\\":
                current = (current or "") + (piece[1:] if not quoted or piece[1:] in '$`"\\' else piece)
            elif char == "'" and not quoted:
                current = (current or "") + piece[1:-1]
            elif char == '"' and not quoted:
                inside, more = self.one(piece[1:-1], quoted=True)
                notes += more
                add(inside, True)
                current = "" if current is None and inside else current
            elif char in "$`" and len(piece) > 1:
                values, more, array = self.value(piece)
                notes += more
                if quoted:
                    if array and not values and not done and text == piece:
                        return [], notes
                    add(values, array)
                elif split:
                    parts = [part for value in values for part in value.split()]
                    lead = bool(values) and values[0][:1].isspace()
                    if parts and current is not None and lead:
                        done.append(current)
                        current = None
                    add(parts, True)
                else:
                    current = (current or "") + " ".join(values)
            else:
                current = (current or "") + piece
            at = end
        return (done if current is None else [*done, current]), notes

    def value(self, piece: str) -> tuple[list[str], list[str], bool]:
        """(values, what they depend on, whether they are words of their own in quotes) of `$NAME`, `${...}`, `$(...)`."""
        if piece.startswith(("`", "$(", "$'")):
            return [_GAP], [f"{cut(' '.join(piece.split()))} is not run: not decided"], False
        inside = piece[2:-1] if piece.startswith("${") else piece[1:]
        found = re.fullmatch(r"([A-Za-z_]\w*|\d+|[@*#?$!-])(\[[@*]\])?(?:(:?[-=+])(.*))?", inside, re.DOTALL)
        if found is None or found[1] in "#?$!-" or (self.moved and not found[1].isidentifier()):
            return [_GAP], [f"{cut(piece)} is not followed: not decided"], False
        name, operator = found[1], found[3] or ""
        held = self.values.get(name)
        self.asked.add(name)
        if name in "@*":
            numbered = [self.env[n] for n in sorted(filter(str.isdecimal, self.env), key=int) if int(n)]
            return numbered, [] if numbered else ['"$@" has no values: assumed empty (--env 1=...)'], True
        present = held is not None and (any(held.words) or ":" not in operator)
        if operator.endswith("+"):
            held, present = None, not present
        if operator and not present:
            if (operator.endswith("+") and found[1] in self.values) or not operator.endswith("+"):
                words, notes = self.one(found[4], quoted=True)
                made = ["".join(words)]
                if operator.endswith("="):
                    self.values[name] = _Value(tuple(made), notes=tuple(notes))
                return made, notes, False
            return [""], [], False
        if held is None:
            missing = not operator
            return [""], [f"${name} has no value: assumed empty (--env {name}=...)"] if missing else [], False
        words = list(held.words) if not held.array or found[2] else list(held.words[:1])
        self.spend(words, len(held.notes))
        return words, list(held.notes), bool(found[2]) and found[2] == "[@]"

    # -- the answer ---------------------------------------------------------------------------------------------------------

    def chosen(self) -> tuple[list[str], list[str], list[str]]:
        """The words up to the program's name and those after it in the command with the most options, and notes on them."""
        if self.started:
            program, words, notes = max(reversed(self.started), key=lambda one: _options(one[1]))
            others = {tuple(rest) for _, rest, _ in self.started if _options(rest)} - {tuple(words)}
            if others:
                notes = [
                    f"{len(others) + 1} commands start a program with options: the one with the most options is read",
                    *notes,
                ]
        else:
            program, notes = [], ["no command starts a Python program here: all options in the text are read"]
            held = [value for name, value in self.values.items() if name not in ("PWD", "0")]
            words = [word for value in held for word in _again(value.words)]
            notes += [note for value in held for note in value.notes]
            if not _options(words):  # variables come first, since a job submission has options of its own
                words = [word for command in self.other for word in _again(tuple(command))]
            words = words if _options(words) else []
            notes = notes[not words :]
        words, undecided = _decided(words)
        return [word.replace(_GAP, "") for word in program], words, _grouped([*notes, *undecided])

    def unused(self, text: str, what: str) -> list[str]:
        """A note for each given variable that a text nowhere names."""
        names = [name for name in sorted(self.env) if not name.isdigit() and name not in self.asked]
        return [
            f"--env {name}: {what} does not use it" for name in names if not re.search(rf"\b{re.escape(name)}\b", text)
        ]


def _tokens(text: str, notes: list[str]) -> Iterator[tuple[str, str, int]]:
    """('word' or 'operator', as written, line): without comments, redirections and here-documents; the last is a line's end."""
    at, line, start = 0, 1, 0
    dropped, documents = False, list[str]()
    while at < len(text):
        if text.startswith("\\\n", at):
            at, line = at + 2, line + 1
            continue
        if at == start and (found := _REDIRECTION.match(text, at)):
            start = at = found.end()
            dropped = True
            documents += [""] if found[1] in ("<<", "<<-") else []
            continue
        array = text[at] == "(" and _ASSIGNMENT.fullmatch(text, start, at)
        operator = None if array else _OPERATOR.match(text, at)
        if not (operator or text[at] in " \t" or (text[at] in "<>" and not text[start:at].isdigit())):
            end = text.find("\n", at) if at == start and text[at] == "#" else _piece(text, at, line, array=bool(array))
            end = len(text) if end < 0 else end
            start = end if at == start and text[at] == "#" else start
            line += text.count("\n", at, end)
            at = end
            continue
        written = text[start:at].replace("\\\n", "")
        if written and documents and not documents[-1]:
            documents[-1], dropped = written.strip("'\"\\"), False
        elif written:
            if not dropped:
                yield "word", written, line
            dropped = False
        if operator:
            yield "operator", operator[0], line
        at += len(operator[0]) if operator else text[at] in " \t"
        if operator and operator[0] == "\n":
            line += 1
            for name in filter(None, documents):
                at, more = _document(text, at, name)
                notes.append(f"line {line - 1}: a here-document is not read")
                line += more
            documents = []
        start = at
    if text[start:] and not dropped:
        yield "word", text[start:].replace("\\\n", ""), line
    yield "operator", "\n", line


def _has_braces(text: str) -> bool:
    """Whether the shell expands braces in a word, {a,b} or {1..3}, before its first quote or variable."""
    unquoted = _UNQUOTED.match(text)
    return any("," in found or ".." in found for found in _BRACES.findall(unquoted[0] if unquoted else ""))


def _decided(words: list[str]) -> tuple[list[str], list[str]]:
    """Words without those that only running would tell, nor the options whose values those are; and the names of these options."""
    kept, notes = list[str](), list[str]()
    for word in words:
        if _GAP not in word:
            kept.append(word)
            continue
        if _OPTIONS in word:
            continue
        option = (
            word.partition("=")[0]
            if word.startswith("--")
            else kept.pop()
            if kept and kept[-1].startswith("--") and "=" not in kept[-1]
            else ""
        )
        notes += (
            [f"{cut(option)}: its value is known only when the script runs: not decided"]
            if option and _GAP not in option
            else []
        )
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


def _document(text: str, at: int, name: str) -> tuple[int, int]:
    """(where a here-document ends, its lines)."""
    lines = 0
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        line, at, lines = text[at:end].strip(), end + 1, lines + 1
        if line == name:
            break
    return min(at, len(text)), lines


def _piece(text: str, at: int, line: int, *, quoted: bool = False, array: bool = False) -> int:
    """Where the quoted part, the expansion or the plain characters that begin at `at` end. Raises BadValue for what is never closed."""
    char, after = text[at], text[at + 1 : at + 2]
    if char == "\\":
        return min(at + 2, len(text))
    if array or char == "`" or (char in "'\"" and not quoted):
        return _closing(text, at, line)
    if char == "$" and after and (after in "({" or (after == "'" and not quoted)):
        return _closing(text, at + 1, line)
    if char == "$" and after:
        found = re.compile(r"\w+|[@*#?$!-]").match(text, at + 1)
        return at + 1 if found is None else at + 2 if found[0][0].isdigit() else found.end()
    found = re.compile(r"[^\s\\'\"`$;&|()<>]+" if not quoted else r"[^\\`$]+").match(text, at)
    return at + 1 if found is None else found.end()


def _closing(text: str, at: int, line: int) -> int:
    """Behind the quote or bracket that closes the one at `at`. Raises BadValue where there is none."""
    stack = [text[at]]
    here = at + 1
    closes = {"(": ")", "{": "}", "`": "`", '"': '"', "'": "'"}
    while here < len(text):
        char, top = text[here], stack[-1]
        if top == "'":
            stack = stack[:-1] if char == "'" else stack
        elif char == "\\":
            here += 1
        elif char == closes[top]:
            stack.pop()
        elif (
            char in '`"'
            or (char == "'" and top != '"')
            or (char in "({" and (top != '"' or text[here - 1] == "$") and (char == "(" or text[here - 1] == "$"))
        ):
            stack.append(char)
        here += 1
        if not stack:
            return here
    what = "a quote" if text[at] in "'\"`" else "a parenthesis"
    raise BadValue(f"{what} opened in line {line} is never closed")
