"""Faults on one rank of two and on the wire, in one launch."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from tests.observe.audit import two_rank_faults
from tests.worlds import reported

pytestmark = pytest.mark.timeout(1400)  # whichever test comes first pays for the launch


@pytest.fixture(scope="module", params=["quick", pytest.param("all", marks=pytest.mark.slow)])
def two(request: Any, tmp_path_factory: Any) -> Any:
    out = pathlib.Path(tmp_path_factory.mktemp("audit")) / "two.json"
    return reported(2, two_rank_faults.__file__, out, request.param, timeout=1400)


def test_every_fault_of_a_rank_or_of_the_wire_is_named(two: Any) -> None:
    slipped = {
        name: row["named"] for name, row in two.items() if row["wanted"] and not set(row["named"]) & set(row["wanted"])
    }
    assert slipped == {}


def test_what_one_rank_does_names_that_rank(two: Any) -> None:
    for name, row in two.items():
        if name.startswith("rank 1") and not name.startswith("rank 1 under autocast"):
            assert any("rank 1" in text for text in row["texts"]), (name, row["texts"])


def test_healthy_runs_of_two_ranks_raise_no_alarm(two: Any) -> None:
    assert {name: row["texts"] for name, row in two.items() if not row["wanted"] and row["texts"]} == {}
