"""Bash builtins, as far as their effect follows from the text: each takes the words after its name."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from mpbridge.errors import MpbridgeError
from mpbridge.stacks.shell.conditions import Truth, counts
from mpbridge.stacks.shell.endings import NotText, Stop
from mpbridge.stacks.shell.fields import bare, unknown_word
from mpbridge.stacks.shell.programs import start
from mpbridge.stacks.shell.reads import mapfile, read
from mpbridge.stacks.shell.syntax import Command, parse
from mpbridge.stacks.shell.values import ASSIGNMENT

if TYPE_CHECKING:
    from mpbridge.stacks.shell.commands import Follower


def declare(follower: Follower, name: str, raws: list[str]) -> None:
    """`export`, `local`, `declare`: the assignments among their words. A function's local variables are restored at its end."""
    options = "".join(raw[1:] for raw in raws if raw.startswith("-"))
    own = name == "local" or (name in ("declare", "typeset") and "g" not in options)
    for raw in raws:
        # "$name=value" is one word that becomes an assignment
        text = raw if ASSIGNMENT.fullmatch(raw) or raw.startswith("-") else " ".join(follower.values.fields(raw))
        found = ASSIGNMENT.fullmatch(text)
        variable = found[1] if found else text
        if raw.startswith("-") or not re.fullmatch(r"[A-Za-z_]\w*", variable):
            continue
        if own:
            follower.keep(variable, cleared=found is None)
        if "n" in options and found:
            follower.values.references[variable] = bare(follower.values.text(found[4]))
        elif found:
            follower.assign(found)
        elif "A" in options:
            follower.values.variables.setdefault(variable, {})


def prints(name: str, words: list[str], unknown: bool) -> list[str]:
    """The output of a command that depends only on its words. Raises NotText for any other."""
    paths = [word for word in words if not word.startswith("-")]
    if name in ("dirname", "basename", "realpath", "readlink") and paths and not unknown and paths[0]:
        first = paths[0]
        changed = {
            "dirname": posixpath.dirname(first) or ".",
            "basename": posixpath.basename(first.rstrip("/")).removesuffix(
                paths[1] if name == "basename" and len(paths) > 1 else "\0"
            ),
        }.get(name, posixpath.normpath(first))
        return [f"{changed}\n"]
    if name == "seq" and all(re.fullmatch(r"-?\d{1,5}", word) for word in words) and 1 <= len(words) <= 2:
        start, end = (1, int(words[0])) if len(words) == 1 else (int(words[0]), int(words[1]))
        return [f"{one}\n" for one in range(start, min(end, start + 200) + 1)]
    raise NotText


def _nothing(follower: Follower, rest: list[str], command: Command) -> Truth:
    return True


def _false(follower: Follower, rest: list[str], command: Command) -> Truth:
    return False


def _test(follower: Follower, rest: list[str], command: Command) -> Truth:
    # a word that is empty because of an empty variable is dropped, as in bash
    words = [word for word in rest if not unknown_word(word)]
    follower.matters(*rest)
    return follower.held(words[:-1] if words[-1:] == ["]"] else words, patterns=False)


def _echo(follower: Follower, rest: list[str], command: Command) -> Truth:
    if follower.output is not None:
        words = [word for word in rest if word not in ("-n", "-e", "-ne", "-en")]
        follower.output.append(" ".join(words) + "\n")
    return True


def _printf(follower: Follower, rest: list[str], command: Command) -> Truth:
    if rest[:1] == ["-v"] and len(rest) > 2:
        follower.values.variables[bare(rest[1])] = rest[-1]
        return True
    if follower.output is not None:
        if not rest or (bare(rest[0]) not in ("%s", "%s\\n", "%s\n") and "%" in bare(rest[0])):
            raise NotText
        follower.output.append(rest[0] if "%" not in rest[0] else "".join(rest[1:]))
    return True


def _cd(follower: Follower, rest: list[str], command: Command) -> Truth:
    if rest:
        before, there = str(follower.values.variables.get("PWD", "")), rest[-1]
        follower.values.variables["PWD"] = (
            there if there.startswith("/") else posixpath.normpath(posixpath.join(before, there))
        )
    return True


def _pwd(follower: Follower, rest: list[str], command: Command) -> Truth:
    if follower.output is not None:
        follower.output.append(f"{follower.values.variables.get('PWD', '')}\n")
    return True


def _set(follower: Follower, rest: list[str], command: Command) -> Truth:
    for at, word in enumerate(map(bare, rest)):
        if word == "--":
            break
        if re.fullmatch(r"[-+][a-z]*e[a-z]*", word) or (word in ("-o", "+o") and rest[at + 1 : at + 2] == ["errexit"]):
            follower.ends_at_failure = word[0] == "-"
    if "--" in rest:
        follower.values.positional = rest[rest.index("--") + 1 :]
    return True


def _shift(follower: Follower, rest: list[str], command: Command) -> Truth:
    count = int(bare(rest[0])) if rest and bare(rest[0]).isdigit() else 1
    done = bool(follower.values.positional)
    follower.values.positional = follower.values.positional[count:]
    return done


def _unset(follower: Follower, rest: list[str], command: Command) -> Truth:
    for word in rest:
        follower.values.variables.pop(bare(word), None)
    return True


def _let(follower: Follower, rest: list[str], command: Command) -> Truth:
    truth: Truth = True
    for word in rest:
        truth, seen = counts(bare(word), follower.values)
        follower.matters(*seen)
    return truth


def _getopts(follower: Follower, rest: list[str], command: Command) -> Truth:
    if follower.values.positional:
        follower.notes.append("getopts is not followed: the script's own arguments are ignored there")
    return False


def _eval(follower: Follower, rest: list[str], command: Command) -> Truth:
    with follower.deeper():
        return follower.block(parse(" ".join(rest), follower.notes))


def _exec(follower: Follower, rest: list[str], command: Command) -> Truth:
    if rest:
        start(follower, rest, command)
    return None


def _break(follower: Follower, rest: list[str], command: Command) -> Truth:
    raise Stop("break")


def _continue(follower: Follower, rest: list[str], command: Command) -> Truth:
    raise Stop("continue")


def _return(follower: Follower, rest: list[str], command: Command) -> Truth:
    raise Stop("return")


def _exit(follower: Follower, rest: list[str], command: Command) -> Truth:
    if follower.output is not None or any(".py" in bare(word) for one in follower.commands for word in one):
        raise Stop("exit")
    follower.notes.append(f"`{' '.join(command.words)}` would end the script before it starts a program: ignored")
    return True


def _source(follower: Follower, rest: list[str], command: Command) -> Truth:
    name = " ".join(rest[:1])
    where = _beside(follower, bare(name))
    shown = " ".join(command.words[1:2])
    if where is None:
        follower.notes += [
            *follower.values.told(name),
            f"`source {shown}` is not read: no such file next to the script, so what it sets is unknown",
        ]
        return None
    follower.notes.append(f"`source {shown}`: the file {where.name} next to the script is read too")
    kept = follower.values.positional
    if len(rest) > 1:
        follower.values.positional = rest[1:]
    try:
        with follower.deeper():
            text = where.read_text(encoding="utf-8", errors="replace").replace("\0", "")
            return follower.block(parse(text, follower.notes))
    except Stop as stop:
        if stop.what != "return":
            raise
        return None
    finally:
        follower.values.positional = kept


def _beside(follower: Follower, name: str) -> Path | None:
    """A sourced file, if it is in the script's folder, one folder up, or below; never through a link that leaves it."""
    if follower.folder is None or not name:
        return None
    here = follower.folder.resolve()
    for path in (here / name, follower.folder / Path(name).name if "/" not in name else here / name):
        try:
            found = path.resolve()
            inside = found.is_relative_to(here.parent)
            if inside and found.is_file() and found.stat().st_size < 400_000:
                return found
        except (OSError, ValueError, MpbridgeError):
            continue
    return None


Builtin = Callable[["Follower", list[str], Command], Truth]
BUILTINS: Mapping[str, Builtin] = MappingProxyType(
    {
        **dict.fromkeys((":", "true", "ulimit", "trap", "alias", "shopt", "wait", "umask", "hash", "type", "jobs", "disown"), _nothing),
        "false": _false, "test": _test, "echo": _echo, "printf": _printf, "cd": _cd, "pwd": _pwd, "set": _set, "shift": _shift, "unset": _unset, "read": read, "let": _let, "getopts": _getopts, "eval": _eval, "exec": _exec, "break": _break, "continue": _continue, "return": _return, "exit": _exit, "source": _source,
        "[": _test, ".": _source, "pushd": _cd, "mapfile": mapfile, "readarray": mapfile,
    }
)  # fmt: skip
"""Bash builtins that are followed; every other command is a program."""
