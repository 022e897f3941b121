"""Tables in narrow places: columns while they can be read, else each row as lines."""

from __future__ import annotations

import io

import pytest
from mpbridge.report.tables import table
from rich.console import Console

ROWS = [("model.params_dtype", "", "bf16", "resident parameters of a model with a long explanation"), ("ddp.grad_reduce_in_fp32", "", "true", "gradient buffers")]  # fmt: skip


def drawn(width: int) -> list[str]:
    made = table("decided", ("field", "before", "after", "why"), whole=("field",))
    for row in ROWS:
        made.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=width).print(made)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 50, 60, 80, 120])
def test_no_line_is_wider_than_the_place_and_no_word_is_broken(width: int) -> None:
    lines = drawn(width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for row in ROWS:
        for cell in row:
            assert set(cell.split()) <= {word.rstrip(";") for word in words}


def test_a_column_that_says_nothing_is_left_out() -> None:
    assert "after" in drawn(120)[2]
    assert "before" not in drawn(120)[2]


def test_a_wide_place_shows_a_table_and_a_narrow_one_records() -> None:
    assert any(line.split() == ["field", "after", "why"] for line in drawn(120))
    assert any(line.strip().startswith("after: bf16; why: resident") for line in drawn(45))
