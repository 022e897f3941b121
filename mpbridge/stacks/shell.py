"""The arguments that a shell script hands to its Python program, read as text: nothing is executed.

Understood: comments, continued lines, assignments (`A=x`, `export A=x`, `A+=" x"`), arrays (`A=(...)`, `A+=(...)`), `$A`, `${A}`, `${A:-x}`,
`${A[@]}`, here documents passed over, and `if`/`elif`/`else`/`case` on values that are known. Anything else leaves a note.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mpbridge.errors import BadValue

MOST = 400_000
"""Characters of a script; launch scripts are a hundredth of it."""
_ASSIGN = re.compile(r"^(?:export\s+|local\s+|declare\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(
    r"\$(?:\{(#?)([A-Za-z_]\w*|\d+)(?:\[[@*]\])?(?:(:?[-=+?])([^{}]*)|[#%/:,^][^{}]*)?\}|([A-Za-z_]\w*|\d))"
)
_OPENERS = ("for ", "while ", "until ", "select ")


@dataclass
class Script:
    """What was read."""

    words: list[str] = field(default_factory=list)
    """Of the command that starts the program, expanded, from behind the program's name on."""
    unset: list[str] = field(default_factory=list)
    """Variables without a value, in order of appearance."""
    notes: list[str] = field(default_factory=list)
    """What was passed over, and what was assumed."""


def read_script(text: str, env: Mapping[str, str]) -> Script:
    """The arguments in a launch script. env: values of variables that it takes from outside. Raises BadValue for what is no script."""
    if len(text) > MOST or "\0" in text:
        raise BadValue("this is not a launch script: it is larger than 400,000 characters or holds NUL bytes")
    reader = _ShellReader(dict(env))
    for statement in _statements(text):
        reader.take(statement)
    return reader.result()


class _ShellReader:
    """Variables and branches while the statements go by."""

    def __init__(self, env: dict[str, str]) -> None:
        self.given = frozenset(env)
        self.values: dict[str, str] = dict(env)
        self.script = Script()
        self.commands: list[str] = []
        self.branches: list[str] = []
        """Of each open `if`: 'take', 'skip' (not yet true) or 'done'."""

    def take(self, statement: str) -> None:
        if self._branch(statement) or any(state != "take" for state in self.branches):
            return
        body = statement.removeprefix("then ").removeprefix("else ").removeprefix("do ").strip()
        found = _ASSIGN.match(body)
        if found and not _is_prefix_of_command(found[3]):
            self._assign(found[1], found[2] == "+", found[3].strip())
        elif body:
            self.commands.append(body)

    def _branch(self, statement: str) -> bool:
        """Whether the statement only opens, turns or closes a branch."""
        word = statement.split(None, 1)[0] if statement.split() else ""
        if word == "if":
            outer = all(state == "take" for state in self.branches)
            self.branches.append(self._judge(statement[2:]) if outer else "done")
            return True
        if word == "elif" and self.branches:
            self.branches[-1] = "done" if self.branches[-1] in ("take", "done") else self._judge(statement[4:])
            return True
        if word == "else" and self.branches:
            self.branches[-1] = "take" if self.branches[-1] == "skip" else "done"
            return len(statement.split()) == 1
        if word == "fi" and self.branches:
            self.branches.pop()
            return True
        return word in ("then", "done", "do", "esac", "{", "}") and len(statement.split()) == 1

    def _judge(self, condition: str) -> str:
        text = condition.strip().removesuffix("then").strip().rstrip(";").strip()
        inner = re.sub(r"^\[\[?\s*|\s*\]\]?$", "", text)
        truth = _truth([self._expand(word) for word in _split(inner)])
        if truth is None:
            self.script.notes.append(f"the condition `{text}` is not understood: its first branch is passed over")
        return "take" if truth else "skip"

    def _assign(self, name: str, more: bool, value: str) -> None:
        if name in self.given and not more:
            return
        if value.startswith("("):
            value = value[1:].rstrip().removesuffix(")")
            joined = " ".join(self._expand(word) for word in _split(value))
        else:
            joined = " ".join(self._expand(word) for word in _split(value))
        self.values[name] = f"{self.values.get(name, '')} {joined}".strip() if more else joined

    def _expand(self, word: str) -> str:
        for _ in range(8):  # a value may hold variables of its own
            changed = _VARIABLE.sub(self._value, word)
            if changed == word:
                break
            word = changed
        return word

    def _value(self, found: re.Match[str]) -> str:
        name, operator, default = found[2] or found[5], found[3] or "", found[4] or ""
        if name in self.values and (self.values[name] or ":" not in operator):
            return default if "+" in operator else self.values[name]
        if operator.endswith(("-", "=")):
            return default.strip("\"'")
        if operator.endswith("+"):
            return ""
        if name not in self.script.unset:
            self.script.unset.append(name)
        return ""

    def result(self) -> Script:
        best: list[str] = []
        for command in self.commands:
            words = [part for word in _split(command) for part in _again(self._expand(word))]
            at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
            mine = words[at + 1 :] if at is not None else []
            if sum(word.startswith("--") for word in mine) >= sum(word.startswith("--") for word in best):
                best = mine or best
        if not best:
            # a fragment: arrays or a string of options without the command that uses them
            best = [part for value in self.values.values() for part in _again(value)]
            best += [part for command in self.commands for part in _again(self._expand(command))]
            if best:
                self.script.notes.append("no command starts a Python program here: every option of the text counts")
        self.script.words = [word for word in best if word]
        return self.script


def _again(value: str) -> list[str]:
    """The words of an unquoted expansion, which the shell splits once more."""
    return _split(value) if " --" in f" {value}" or (" " in value.strip() and value.startswith("-")) else [value]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.replace('"', " ").replace("'", " ").split()


def _is_prefix_of_command(value: str) -> bool:
    """`A=1 B=2 torchrun x.py` sets variables of one command: an unquoted value followed by more words."""
    return not value.startswith(("(", '"', "'", "`", "$(")) and len(_split(value)) > 1


def _truth(words: list[str]) -> bool | None:
    """Of a test's words; None: not understood."""
    if words[:1] == ["!"]:
        inner = _truth(words[1:])
        return None if inner is None else not inner
    for glue, join in (("||", any), ("&&", all), ("-o", any), ("-a", all)):
        if glue in words:
            at = words.index(glue)
            parts = [
                _truth([w for w in words[:at] if w not in ("[[", "]]", "[", "]")]),
                _truth([w for w in words[at + 1 :] if w not in ("[[", "]]", "[", "]")]),
            ]
            return None if None in parts else join(bool(part) for part in parts)
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) == 3:
        left, operator, right = words
        if operator in ("=", "==", "!="):
            return (left == right) == (operator != "!=")
        if operator in ("-eq", "-ne", "-gt", "-lt", "-ge", "-le") and _number(left) and _number(right):
            a, b = int(left), int(right)
            return {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-lt": a < b, "-ge": a >= b, "-le": a <= b}[operator]
    if len(words) == 1 and words[0] in ("true", "false"):
        return words[0] == "true"
    return None


def _number(text: str) -> bool:
    return re.fullmatch(r"-?\d+", text) is not None


def _statements(text: str) -> Iterator[str]:
    """Logical lines: continuations joined, comments off, arrays and quoted strings whole, here documents left out."""
    lines = iter(text.splitlines())
    for line in lines:
        whole = line
        # a continued line, an open quote or an open array goes on
        while (joined := _open(whole)) is not None:
            following = next(lines, None)
            if following is None:
                break
            whole = joined + following
        here = re.search(r"<<-?\s*['\"]?(\w+)['\"]?", whole)
        if here:
            for following in lines:
                if following.strip() == here[1]:
                    break
        yield from _parts(whole)


def _open(line: str) -> str | None:
    """`line` ready for its continuation; None when it is whole."""
    bare = _bare(line)
    if bare.endswith("\\"):
        return line.rstrip()[:-1] + " "
    if bare.count('"') % 2 or bare.count("'") % 2:
        return line + "\n"
    if re.search(r"\+?=\($|\+?=\(.*", bare) and bare.count("(") > bare.count(")"):
        return _without_comment(line) + "\n"
    return None


def _without_comment(line: str) -> str:
    """`line` up to a `#` that starts a word outside of quotes."""
    quote = ""
    for i, sign in enumerate(line):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign == "#" and (i == 0 or line[i - 1] in " \t(\n"):
            end = line.find("\n", i)
            return line[:i] + (_without_comment(line[end:]) if end >= 0 else "")
    return line


def _bare(line: str) -> str:
    """`line` without comments and escaped quotes: what counts for open quotes and parentheses."""
    return re.sub(r"\\[\"']", "", _without_comment(line)).rstrip()


def _parts(line: str) -> Iterator[str]:
    """Statements of a logical line: split at `;` outside of quotes and parentheses."""
    text, quote, depth, start = _without_comment(line), "", 0, 0
    for i, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in "()":
            depth += 1 if sign == "(" else -1
        elif sign == ";" and depth <= 0:
            yield text[start:i].strip()
            start = i + 1
    yield text[start:].strip()
