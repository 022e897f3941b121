"""Expands the words of a shell script as bash does: variables, arrays, arithmetic, quotes, splitting. Unknown values leave a mark.

A mark replaces a value known only at run time or from outside. It propagates through assignments and
substitutions, counts as empty in every comparison, and finally shows which of the relevant words were unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mpbridge.errors import BadValue
from mpbridge.stacks.shell.arithmetic import computed
from mpbridge.stacks.shell.cuts import in_other_case, part, replaced, trimmed
from mpbridge.stacks.shell.fields import END, MARK, PLAIN, WordBuilder, bare, braces
from mpbridge.stacks.shell.lexer import end_of, words_of

LONGEST = 1_000_000
"""Maximum length of one value, against scripts that double a variable in a loop."""
_NAME = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]")
_PLAIN_SIGNS = re.compile(r"[^\\'\"`$]+")
_PARAMETER = re.compile(r"([#!]?)([A-Za-z_]\w*|\d+|[@*?$#!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=(.*)", re.DOTALL)

NO_VALUE = re.compile(r"(\$\w+) has no value: assumed empty")
"""The note on an unset variable; starts with its name."""

ShellValue = str | list[str] | dict[str, str]


@dataclass
class Values:
    """Variables, and the notes behind marks."""

    variables: dict[str, ShellValue] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    references: dict[str, str] = field(default_factory=dict)
    """Name -> the variable that it refers to (declare -n)."""
    script: str = ""
    """$0."""
    asked: set[str] = field(default_factory=set)
    """Names of variables whose value was asked for."""
    marks: list[str] = field(default_factory=list)
    """The note of each mark."""
    run: Callable[[str], str | None] = lambda _: None
    """Text of a command -> its output, if that follows from the text alone."""

    def mark(self, text: str) -> str:
        """The mark of an unknown value."""
        if text not in self.marks:
            self.marks.append(text)
        return f"{PLAIN}{self.marks.index(text)}{END}"

    def told(self, text: str) -> list[str]:
        """The notes of the marks in a text."""
        return [self.marks[int(found[1])] for found in MARK.finditer(text)]

    # expansion

    def fields(self, raw: str) -> list[str]:
        """The words that one word expands to. A word of marks only is kept, for `told`."""
        made = WordBuilder()
        for one in braces(raw):
            self._into(made, one, quoted=False)
            made.close()
        return made.whole()

    def text(self, raw: str) -> str:
        """A word that is not split: an assignment's value, a pattern."""
        made = WordBuilder(splits=False)
        self._into(made, raw, quoted=False)
        return " ".join(made.whole())

    def pattern(self, raw: str) -> str:
        """A word as a pattern, with its quoted parts literal."""
        made = WordBuilder(splits=False, pattern=True)
        self._into(made, raw, quoted=False)
        return "".join(made.whole())

    def here(self, raw: str) -> str:
        """A here-document's text: expanded, not split, with literal quotes."""
        made = WordBuilder(splits=False)
        self._into(made, raw, quoted=True)
        return "".join(made.whole())

    def _into(self, made: WordBuilder, raw: str, *, quoted: bool) -> None:
        at = 0
        while at < len(raw):
            at = (self._escaped if raw[at] == "\\" else self._piece)(made, raw, at, quoted)

    def _piece(self, made: WordBuilder, raw: str, at: int, quoted: bool) -> int:
        """Adds what starts at `at`: quotes, an expansion, or plain characters up to the next special one. Returns the position after it."""
        sign, ansi = raw[at], raw.startswith("$'", at)
        end = at + 1 if quoted and (ansi or sign in "'\"") else end_of(raw, at)
        end = len(raw) if end < 0 else end
        if sign == "`":
            made.add(self._output(raw[at + 1 : end - 1].replace("\\`", "`")), quoted=quoted)
        elif sign == "$" and (quoted or not ansi):
            end = self._dollar(made, raw, at, end, quoted)
        elif sign in "$'\"" and not quoted:
            self._quotes(made, raw[at:end])
        else:
            stop = _PLAIN_SIGNS.match(raw, at)
            end = stop.end() if stop else at + 1
            made.add(raw[at:end], quoted=quoted, literal=True)
        return end

    def _quotes(self, made: WordBuilder, raw: str) -> None:
        """`'...'`, `"..."` and `$'...'`; unclosed quotes end with the text."""
        if raw.startswith("$"):
            made.add(_ansi(raw[2:-1]), quoted=True)
            return
        inside = raw[1:-1] if raw[-1] == raw[0] and len(raw) > 1 else raw[1:]
        made.add(inside if raw[0] == "'" else "", quoted=True)
        if raw[0] == '"':
            self._into(made, inside, quoted=True)

    def _escaped(self, made: WordBuilder, raw: str, at: int, quoted: bool) -> int:
        after = raw[at + 1 : at + 2]
        if after != "\n":
            keeps = quoted and after not in ("$", "`", '"', "\\")
            made.add(f"\\{after}" if keeps else after, quoted=True)
        return at + 2

    def _dollar(self, made: WordBuilder, raw: str, at: int, end: int, quoted: bool) -> int:
        if raw.startswith("$((", at) and raw[end - 2 : end] == "))":
            made.add(self.arithmetic(raw[at + 3 : end - 2]), quoted=quoted)
        elif raw.startswith("$(", at):
            made.add(self._output(raw[at + 2 : end - 1]), quoted=quoted)
        elif raw.startswith("${", at):
            self._parameter(made, raw[at + 2 : end - 1], quoted)
        else:
            name = _NAME.match(raw, at + 1)
            if name is None:
                made.add("$", quoted=quoted, literal=True)
                return at + 1
            text = name[0] if not name[0].isdigit() else name[0][0]
            self._parameter(made, text, quoted)
            return at + 1 + len(text)
        return end

    def _output(self, command: str) -> str:
        """The output of a substituted command, or a mark."""
        found = self.run(command)
        return self.mark(f"$({' '.join(command.split())}) is not run: assumed empty") if found is None else found

    def _parameter(self, made: WordBuilder, inside: str, quoted: bool) -> None:
        found = _PARAMETER.fullmatch(inside)
        if found is None:
            made.add(self.mark(f"${{{inside}}} is not understood: assumed empty"), quoted=quoted)
            return
        kind, name, index, operation = found[1], found[2], found[3], found[4]
        if kind == "!" and index is None and not operation:
            name, kind = bare(str(self.get(name) or "")) or "?", ""
        value = self._indexed(name, index)
        if kind == "!" and isinstance(value, dict):
            made.add_all(list(value), quoted)
        elif kind:
            made.add(str(len(bare(value)) if isinstance(value, str) else len(value or ())), quoted=quoted)
        else:
            value = self._changed(name, value, operation) if operation else value
            value = self._missing(name) if value is None else value
            _put(made, value, joined="*" in (name, index), quoted=quoted)

    def get(self, name: str) -> ShellValue | None:
        """A variable's value; None if unset."""
        if name in ("@", "*"):
            return self.positional or None
        if name.isdigit():
            at = int(name)
            return self.script if not at else self.positional[at - 1] if at <= len(self.positional) else None
        if name == "#":
            return str(len(self.positional))
        name = self.references.get(name, name)
        self.asked.add(name)
        return self.variables.get(name)

    def _indexed(self, name: str, index: str | None) -> ShellValue | None:
        value = self.get(name)
        if name == "BASH_SOURCE":
            return self.script
        if index in ("@", "*"):
            return [value] if isinstance(value, str) else value
        if name in ("@", "*"):
            return value
        if isinstance(value, dict):
            return value.get(bare(self.text(index)) if index is not None else "0")
        if isinstance(value, list):
            try:
                return value[int(bare(self.arithmetic(index)) or 0) if index is not None else 0]
            except (IndexError, ValueError):
                return None
        return value

    def _missing(self, name: str) -> ShellValue:
        if name in ("@", "*"):
            return [self.mark('"$@" has no values: assumed empty (--env 1=... --env 2=...)')]
        if name in "?$!-#":
            return self.mark(f"${name} is known only at run time: assumed empty")
        return self.mark(f"${name} has no value: assumed empty (--env {name}=...)")

    def _changed(self, name: str, value: ShellValue | None, operation: str) -> ShellValue | None:
        """`${A operation}`."""
        default = re.fullmatch(r"(:?)([-=+?])(.*)", operation, re.DOTALL)
        if default:
            return self._with_default(name, value, default)
        if value is None:
            return None
        if isinstance(value, str):
            return self._cut(value, operation)
        if isinstance(value, list) and operation.startswith(":"):
            start, _, length = operation[1:].partition(":")
            first = int(bare(self.arithmetic(start)) or 0) - (value is self.positional and start.strip() != "0")
            return value[first:][: int(bare(self.arithmetic(length)) or 0)] if length else value[first:]
        return [self._cut(item, operation) for item in texts(value)]

    def _with_default(self, name: str, value: ShellValue | None, default: re.Match[str]) -> ShellValue | None:
        """`${A:-text}` and similar; default: the colon, the operator and the text."""
        empty = value is None or (bool(default[1]) and not bare(value if isinstance(value, str) else "".join(value)))
        if default[2] == "+":
            return "" if empty else self.text(default[3])
        if not empty or default[2] == "?":
            return value
        made = self.text(default[3])
        if default[2] == "=":
            self.variables[name] = made
        return made

    def _cut(self, value: str, operation: str) -> str:
        """One text without what `#`, `%` or `:` takes away, or with what `/`, `^` or `,` changes."""
        if operation[0] in "#%":
            twice = operation[:2] in ("##", "%%")
            wanted = self.pattern(operation[2 if twice else 1 :])
            return trimmed(value, wanted, front=operation[0] == "#", longest=twice)
        if operation[0] == "/":
            every = operation.startswith("//")
            parts = re.fullmatch(r"((?:[^/\\]|\\.)*)(?:/(.*))?", operation[2 if every else 1 :], re.DOTALL)
            old, new = (parts[1], parts[2] or "") if parts else ("", "")
            wanted, replacement = self.pattern(old), self.text(new)
            return replaced(value, wanted, replacement, every=every) if old else value
        found = in_other_case(value, operation) if operation[0] in "^," else part(value, operation)
        return self.mark(f"${{...{operation}}} is not understood: assumed empty") if found is None else found

    def arithmetic(self, text: str) -> str:
        """`$(( text ))` on integers; a mark if it cannot be computed."""
        expanded = self.here(text)
        named = re.sub(r"[A-Za-z_]\w*", lambda found: str(self._number(found[0])), bare(expanded))
        marks = "".join(found[0] for found in MARK.finditer(expanded))
        try:
            return f"{computed(named)}{marks}"
        except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
            return self.mark(f"$(({' '.join(text.split())})) is not computed: assumed empty")

    def _number(self, name: str) -> int:
        value = self.get(name)
        text = bare(value) if isinstance(value, str) else ""
        return int(text) if re.fullmatch(r"-?\d+", text) else 0

    # assignment

    def assign(self, name: str, index: str | None, more: bool, raw: str) -> None:
        """`NAME=raw`, `NAME+=raw`, `NAME=(...)`, `NAME[index]=raw`."""
        name = self.references.get(name, name)
        before = self.variables.get(name)
        made: ShellValue
        if raw.startswith("(") and index is None:
            made = self._array(raw[1:].removesuffix(")"), before, more)
        else:
            text = self.text(raw)
            if index is not None:
                made = self._element(before, index, text, more)
            elif isinstance(before, list):
                made = [(before[0] if before and more else "") + text if more else text, *before[1:]]
            else:
                made = (before if isinstance(before, str) else "") + text if more else text
        if (len(made) if isinstance(made, str) else sum(map(len, made))) > LONGEST:
            raise BadValue(f"${name} grows beyond {LONGEST} characters")
        self.variables[name] = made

    def _array(self, inside: str, before: ShellValue | None, more: bool) -> ShellValue:
        words = words_of(inside)
        keyed = [re.fullmatch(r"\[([^\]]*)\]=(.*)", word, re.DOTALL) for word in words]
        if words and all(keyed):
            made = dict(before) if more and isinstance(before, dict) else {}
            return made | {bare(self.text(one[1])): self.text(one[2]) for one in keyed if one}
        old = [] if not more or before is None else [before] if isinstance(before, str) else list(before)
        return [*old, *(one for word in words for one in self.fields(word))]

    def _element(self, before: ShellValue | None, index: str, text: str, more: bool) -> ShellValue:
        if (
            isinstance(before, dict)
            or not re.fullmatch(r"[\s\w$+*-]*", index)
            or not bare(self.arithmetic(index)).isdigit()
        ):
            key = bare(self.text(index))
            held: Mapping[str, str] = before if isinstance(before, dict) else {}
            return {**held, key: held.get(key, "") + text if more else text}
        items = [before] if isinstance(before, str) else list(before or [])
        at = int(bare(self.arithmetic(index)))
        if at > 1000:
            raise BadValue(f"an array of {at} elements, too many for a launch script")
        items += [""] * (at + 1 - len(items))
        items[at] = items[at] + text if more else text
        return items


def _ansi(text: str) -> str:
    named = {"n": "\n", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
    return re.sub(r"\\(.)", lambda found: named.get(found[1], found[0]), text)


def _put(made: WordBuilder, value: ShellValue, *, joined: bool, quoted: bool) -> None:
    """Adds a text, or an array's texts: each as a word, or all joined into one (`"${A[*]}"`)."""
    if isinstance(value, str):
        made.add(value, quoted=quoted)
    elif joined and quoted:
        made.add(" ".join(texts(value)), quoted=True)
    else:
        made.add_all(texts(value), quoted)


def texts(value: ShellValue) -> list[str]:
    """The texts of a value: one, or an array's."""
    return [value] if isinstance(value, str) else list(value.values()) if isinstance(value, dict) else value
