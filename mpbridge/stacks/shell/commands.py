"""Follows a shell script's commands in order: variables, branches, loops and functions, without running anything."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpbridge.errors import BadValue
from mpbridge.stacks.shell.branches import follow_case, follow_for, follow_if, follow_while, not_there
from mpbridge.stacks.shell.builtins import BUILTINS, declare, prints
from mpbridge.stacks.shell.conditions import Truth, counts, holds
from mpbridge.stacks.shell.endings import NotText, Stop
from mpbridge.stacks.shell.fields import bare, unknown_word
from mpbridge.stacks.shell.inside import first_word, tells, text_of
from mpbridge.stacks.shell.programs import start
from mpbridge.stacks.shell.syntax import (
    CaseCommand,
    Chain,
    Command,
    CommandList,
    For,
    FunctionDefinition,
    Group,
    If,
    Node,
    Pipe,
    While,
    parse,
)
from mpbridge.stacks.shell.values import ASSIGNMENT, ShellValue, Values

MOST_STEPS = 20_000
MOST_CALLS = 20
"""Maximum nesting of functions, sourced files and command strings."""
_DECLARE = frozenset({"export", "local", "declare", "readonly", "typeset"})
_QUIET = frozenset({"mkdir", "echo", "printf", "cd", "set", "sleep", "wait", "trap", "ulimit", "pushd", "popd", "rm", "touch", "module", "ls"})  # fmt: skip
"""Commands that are silently assumed to succeed."""
_TESTS = frozenset({"[", "[[", "test", "(("})


@dataclass
class Follower:
    """State while a script is followed."""

    values: Values
    given: frozenset[str] = frozenset()
    """External variables."""
    folder: Path | None = None
    """The script's folder, from which sourced files are read."""
    commands: list[list[str]] = field(default_factory=list)
    """The words of the programs that it starts, with marks."""
    notes: list[str] = field(default_factory=list)
    functions: dict[str, CommandList] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    output: list[str] | None = None
    """The output, inside a command substitution."""
    files: list[str] = field(default_factory=list)
    """File tests since the last branch: `-f name`."""
    own: list[dict[str, ShellValue | None]] = field(default_factory=list)
    """For each function being followed: the outer values of its local variables; None: unset."""
    ends_at_failure: bool = False
    """set -e."""
    judging: int = 0
    """Depth of enclosing conditions and && or || lists, where a failure does not end the script."""
    steps: int = 0
    depth: int = 0

    def __post_init__(self) -> None:
        self.values.run = self._printed

    def follow(self, block: CommandList) -> None:
        """Follows a whole script until something ends it."""
        with contextlib.suppress(Stop):
            self.block(block)

    def said_of_functions(self) -> None:
        """Adds a note for each function with options that is never called."""
        for name, body in self.functions.items():
            if name not in self.called and tells(body):
                self.notes.append(f"the function {name} is never called: its options are ignored")

    def block(self, block: CommandList) -> Truth:
        """The last command's success; None if known only at run time."""
        truth: Truth = True
        for node in block:
            truth = self._node(node)
        return truth

    def _node(self, node: Node) -> Truth:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise BadValue(f"this script takes more than {MOST_STEPS} steps, too many for a launch script")
        truth = self._any(node)
        if isinstance(node, Command):
            if truth is False and self.ends_at_failure and not self.judging and first_word(node) not in _QUIET:
                self.notes.append(f"`{text_of(node)}` fails, and set -e would end the script there: ignored")
            status = "1" if truth is False else "0"
            said = self.values.mark(f"`{text_of(node)}` is not run: assumed to succeed") if truth is None else ""
            self.values.variables["?"] = said + status
        return truth

    def _any(self, node: Node) -> Truth:
        match node:
            case Command():
                return self._command(node)
            case Chain():
                return self._chain(node)
            case Pipe():
                return self._pipe(node)
            case If():
                return follow_if(self, node)
            case CaseCommand():
                return follow_case(self, node)
            case For():
                return follow_for(self, node)
            case While():
                return follow_while(self, node)
            case FunctionDefinition():
                self.functions[node.name] = node.body
                return True
            case Group():
                return self.apart(node.body) if node.subshell else self.block(node.body)

    def apart(self, block: CommandList) -> Truth:
        """Commands in a subshell, whose variables are dropped at its end."""
        kept = dict(self.values.variables), list(self.values.positional)
        try:
            return self.block(block)
        except Stop as stop:
            if stop.what not in ("exit", "return"):
                raise
            return None
        finally:
            self.values.variables, self.values.positional = kept

    def _chain(self, chain: Chain) -> Truth:
        self.judging += len(chain.items) > 1
        try:
            return self._items(chain)
        finally:
            self.judging -= len(chain.items) > 1

    def _items(self, chain: Chain) -> Truth:
        truth: Truth = True
        before = chain.items[0][1]
        for operator, node in chain.items:
            if truth is None:
                truth = first_word(before) not in _TESTS
                if tells((node,)) and first_word(before) not in _QUIET:
                    taken = "to succeed" if truth else "to fail"
                    goes = "is read" if truth == (operator == "&&") else "is skipped"
                    self.notes.append(
                        f"`{text_of(before)}` is not run: assumed {taken}, what follows {operator} {goes}"
                    )
            if operator:
                not_there(self, (node,))
            if operator and truth != (operator == "&&"):
                continue
            truth, before = self._node(node), node
        return truth

    def _pipe(self, pipe: Pipe) -> Truth:
        if len(pipe.parts) > 1:
            if self.output is not None:
                raise NotText
            truth: Truth = None
            for part in pipe.parts:
                self.apart((part,))
        else:
            truth = self._node(pipe.parts[0])
        return None if truth is None else truth != pipe.negated

    def matters(self, *texts: str) -> None:
        """Values that decide a branch: adds notes on what is unknown."""
        self.notes += [said for text in texts for said in self.values.told(text)]

    # commands

    def _command(self, command: Command) -> Truth:
        raws = list(command.words)
        if not raws:
            return True
        if raws[0] in ("[[", "(("):
            return self._test(raws)
        settings = list(itertools.takewhile(bool, map(ASSIGNMENT.fullmatch, raws)))
        raws = raws[len(settings) :]
        # A=x command: only for that command, whose own words are expanded first
        words = None if not raws or raws[0] in _DECLARE else [word for raw in raws for word in self.values.fields(raw)]
        kept = {one[1]: self.values.variables.get(one[1]) for one in settings if one and raws}
        for one in filter(None, settings):
            self.assign(one)
        if words is None:
            if raws:
                declare(self, raws[0], raws[1:])
            return True
        try:
            return self._called(words, command)
        finally:
            self._restore(kept)

    def _restore(self, kept: Mapping[str, ShellValue | None]) -> None:
        """Restores variables; None: unset."""
        for name, value in kept.items():
            if value is None:
                self.values.variables.pop(name, None)
            else:
                self.values.variables[name] = value

    def assign(self, found: re.Match[str]) -> None:
        """One assignment, as parsed by ASSIGNMENT."""
        name, index, more, raw = found[1], found[2], bool(found[3]), found[4]
        given = self.values.variables.get(name) if name in self.given else None
        self.values.assign(name, index, more, raw)
        made = self.values.variables[self.values.references.get(name, name)]
        if given is not None and not more and made != given and not re.search(rf"\$\{{?{name}\b", raw):
            self.notes.append(f"--env {name}={given} has no effect: the script sets {name}={raw} itself")

    def _test(self, raws: list[str]) -> Truth:
        if raws[0] == "((":
            truth, seen = counts(raws[1], self.values)
            self.matters(*seen)
            return truth
        words = [
            self.values.pattern(raw) if at and raws[at - 1] in ("=", "==", "!=") else self.values.text(raw)
            for at, raw in enumerate(raws[1:], 1)
        ]
        return self.held(words, patterns=True)

    def held(self, words: list[str], *, patterns: bool) -> Truth:
        """Whether a test holds; what it looks at matters."""
        truth, seen, files = holds(words, self.values, patterns=patterns)
        self.files += files
        self.matters(*seen)
        return truth

    def _called(self, words: list[str], command: Command) -> Truth:
        unknown = 0
        while unknown < len(words) and unknown_word(words[unknown]):
            unknown += 1
        before, words = words[:unknown], words[unknown:]
        if not words:
            return True
        name, rest = bare(words[0]), words[1:]
        if name in self.functions:
            return self._function(name, rest)
        if name in BUILTINS:
            return BUILTINS[name](self, rest, command)
        if self.output is not None:
            self.output += prints(name, [bare(word) for word in rest], any(self.values.told(word) for word in rest))
            return True
        start(self, [*before, *words], command)
        return None

    def _function(self, name: str, rest: list[str]) -> Truth:
        self.called.add(name)
        kept, self.values.positional = self.values.positional, rest
        self.own.append({})
        try:
            with self.deeper():
                return self.block(self.functions[name])
        except Stop as stop:
            if stop.what != "return":
                raise
            return None
        finally:
            self.values.positional = kept
            self._restore(self.own.pop())

    def keep(self, name: str, *, cleared: bool) -> None:
        """Saves a variable that becomes local; it is restored when the function ends. cleared: it starts unset."""
        if not self.own:
            return
        self.own[-1].setdefault(name, self.values.variables.get(name))
        if cleared:
            self.values.variables.pop(name, None)

    @contextlib.contextmanager
    def deeper(self) -> Iterator[None]:
        """Context of the commands of a function, file or string. Raises BadValue for endless recursion."""
        self.depth += 1
        if self.depth > MOST_CALLS:
            raise BadValue(f"this script nests more than {MOST_CALLS} calls of functions, files or strings")
        try:
            yield
        finally:
            self.depth -= 1

    # what substituted commands print

    def _printed(self, text: str) -> str | None:
        child = Follower(
            dataclasses.replace(self.values, variables=dict(self.values.variables)), folder=self.folder, functions=dict(self.functions), output=[],
            depth=self.depth + 1, given=self.given, called=self.called, steps=self.steps,
        )  # fmt: skip
        child.values.marks = self.values.marks
        if child.depth > MOST_CALLS:
            return None
        try:
            child.block(parse(text, child.notes))
        except NotText:
            return None
        except Stop:
            return None
        finally:
            self.steps = child.steps
        return None if child.commands else "".join(child.output or []).rstrip("\n")
