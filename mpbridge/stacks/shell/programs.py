"""Programs that a script starts: kept with their words, or followed if they are shells with a command string."""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING

from mpbridge.stacks.shell.fields import bare
from mpbridge.stacks.shell.syntax import Command, parse

if TYPE_CHECKING:
    from mpbridge.stacks.shell.commands import Follower

_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ssh", "sbatch"})
"""Programs that run commands given as text."""


def start(follower: Follower, words: list[str], command: Command) -> None:
    """A program: kept, or followed if it is a shell with commands."""
    plain = [bare(word) for word in words]
    if not any(re.fullmatch(r"\S+\.py", word) for word in plain):
        shell = any(posixpath.basename(word) in _SHELLS for word in plain)
        text = _commands_among(words, plain, shell)
        if text is None and shell and command.inputs:
            here = command.inputs[0]
            text = here.text if here.literal else follower.values.here(here.text)
        if text is not None:
            _follow(follower, text)
            return
    for here in command.inputs:
        if re.search(r"(?m)(^|\s)--\w", here.text):
            follower.notes.append(f"the here-document for `{plain[0]}` is skipped")
    follower.commands.append(words)


def _commands_among(words: list[str], plain: list[str], shell: bool) -> str | None:
    """The first word with commands: a shell's argument, or what follows `--wrap`."""
    for at, word in enumerate(words):
        inside = re.search(r"\.py\b|\bpython3?\b|torchrun", plain[at]) and re.search(r"\s", plain[at].strip())
        if inside and (shell or plain[at - 1] == "--wrap" or plain[at].startswith("--wrap=")):
            return word.removeprefix("--wrap=")
    return None


def _follow(follower: Follower, text: str) -> None:
    """Follows commands in a string, in a subshell with the same variables."""
    with follower.deeper():
        follower.apart(parse(text, follower.notes))
