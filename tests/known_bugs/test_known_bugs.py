"""Public bugs, replayed: each shows its symptom without mpbridge, and mpbridge says what the docs' page claims, or nothing where the page says so."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import pytest

from tests.known_bugs.bugs import BUGS, NOT, Bug
from tests.known_bugs.ranks import MENDED
from tests.worlds import reported

PLAYED = [bug for bug in BUGS if bug.play]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("ranks") / "said.json"
    found: dict[str, str] = reported(2, str(Path(__file__).with_name("ranks.py")), out)
    assert found["healthy"] == ""
    return found


@functools.cache
def played(module: str, name: str) -> str:
    """Several threads are about the same bug."""
    said: str = importlib.import_module(f"tests.known_bugs.{module}").PLAYS[name]()
    return said


@pytest.mark.parametrize("bug", PLAYED, ids=lambda bug: bug.number)
def test_a_public_bug_is_named(bug: Bug, request: pytest.FixtureRequest) -> None:
    module, _, name = bug.play.partition(":")
    if module == "ranks":
        said = request.getfixturevalue("ranks")[name]
        if said == MENDED:
            pytest.skip(MENDED)
    else:
        said = played(module, name)
    if bug.says:
        assert bug.says in said
    else:
        assert said == "", "it is caught: its row should say so"


def test_rows_are_whole() -> None:
    assert len({bug.number for bug in BUGS}) == len(BUGS)
    assert all(bug.when.startswith(NOT) is not bool(bug.says) for bug in BUGS)
    assert all(bug.play for bug in BUGS if bug.says)
