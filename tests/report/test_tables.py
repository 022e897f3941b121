"""Tables: every decision is in them, and what was overridden stands out."""

from __future__ import annotations

import io

from mpbridge.report.tables import plan_table, summary_table
from rich.console import Console

from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.sync.plan import plan


def _shown(renderable: object) -> str:
    out = Console(file=io.StringIO(), width=150, highlight=False)
    out.print(renderable)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def _policy() -> PrecisionPolicy:
    return resolve(get_mixed_precision_config("bf16_mixed"))


def test_every_write_has_a_row_and_overrides_say_how_to_keep_the_value() -> None:
    wanted = plan(
        _policy(),
        model={},
        optimizer={},
        ddp={"grad_reduce_in_fp32": False},
        origin={"ddp.grad_reduce_in_fp32": "the command line"},
    )
    text = _shown(plan_table(wanted))
    assert all(write.name in text for write in wanted.writes)
    (row,) = [line for line in text.splitlines() if line.strip().startswith("ddp.grad_reduce_in_fp32")]
    assert "the command line" in row
    assert "mixed_precision.grad_reduce_in_fp32=false" in row


def test_brackets_in_a_text_are_no_markup() -> None:
    assert "[bold]x[/bold]" in _shown(summary_table([("label", "[bold]x[/bold]")]))
