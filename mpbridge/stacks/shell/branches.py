"""Branches and loops of a shell script: which commands are read, and notes on conditions known only at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpbridge.stacks.shell.conditions import Truth
from mpbridge.stacks.shell.endings import Stop
from mpbridge.stacks.shell.fields import bare, matches
from mpbridge.stacks.shell.inside import tells, text_of
from mpbridge.stacks.shell.syntax import CaseCommand, CommandList, For, If, While

if TYPE_CHECKING:
    from mpbridge.stacks.shell.commands import Follower

MOST_ROUNDS = 200
"""Of one loop."""


def follow_if(follower: Follower, node: If) -> Truth:
    """The first branch whose condition holds."""
    whole = tuple(inner for _, body in node.branches for inner in body)
    for condition, body in node.branches:
        if condition is None or _judged(follower, condition, whole):
            return follower.block(body)
    return True


def _judged(follower: Follower, condition: CommandList, branches: CommandList) -> bool:
    follower.files.clear()
    truth = judged(follower, condition)
    not_there(follower, branches)
    if truth is None and tells(branches):
        text = "; ".join(map(text_of, condition))
        follower.notes.append(f"the condition `{text}` is not run: assumed false, its branch is skipped")
    return bool(truth)


def judged(follower: Follower, condition: CommandList) -> Truth:
    """A condition's value; failure is false."""
    follower.judging += 1
    try:
        return follower.block(condition)
    finally:
        follower.judging -= 1


def not_there(follower: Follower, rest: CommandList) -> None:
    """Adds a note for each file that a condition tests, if the commands behind it matter."""
    if tells(rest):
        follower.notes += [f"`[ {one} ]` is not checked: assumed not to exist" for one in follower.files]
    follower.files.clear()


def follow_case(follower: Follower, node: CaseCommand) -> Truth:
    """The first matching clause, and those that it falls through to."""
    word = follower.values.text(node.word)
    follower.matters(word)
    falls = False
    for patterns, body, ending in node.clauses:
        if falls or any(matches(word, follower.values.pattern(one)) for one in patterns):
            truth = follower.block(body)
            if ending in (";;", ""):
                return truth
            falls = ending == ";&"
    return True


def follow_for(follower: Follower, node: For) -> Truth:
    """A loop over words."""
    for value in _rounds(follower, node)[:MOST_ROUNDS]:
        if node.name:
            follower.values.variables[node.name] = value
        if not _round(follower, node.body):
            break
    return True


def _rounds(follower: Follower, node: For) -> list[str]:
    """The items of a loop; a single round if they are unknown."""
    if node.name == "":  # for ((...))
        follower.notes.append(f"the loop `for (({' '.join(node.words or ())}))` is read once")
        return [""]
    raws = ('"$@"',) if node.words is None else node.words
    rounds = [word for raw in raws for word in follower.values.fields(raw)]
    if not rounds or any(bare(one) or not one for one in rounds):
        return rounds
    if node.words is None or all("@" in raw for raw in node.words):
        return []
    over = " ".join(node.words)
    follower.notes.append(f"the items of the loop over {over} are unknown: its body is read once")
    return rounds[:1]


def follow_while(follower: Follower, node: While) -> Truth:
    """A loop with a condition."""
    for _ in range(MOST_ROUNDS):
        truth = judged(follower, node.condition)
        if truth is None and tells(node.body):
            text = "; ".join(map(text_of, node.condition))
            follower.notes.append(f"the loop's condition `{text}` is not run: its body is read once")
            _round(follower, node.body)
        if truth is None or truth == node.until or not _round(follower, node.body):
            return True
    follower.notes.append(f"a loop runs for more than {MOST_ROUNDS} rounds: not read further")
    return True


def _round(follower: Follower, body: CommandList) -> bool:
    """One round of a loop; False if it ends the loop."""
    try:
        follower.block(body)
    except Stop as stop:
        if stop.what not in ("break", "continue"):
            raise
        return stop.what == "continue"
    return True
