"""One table: what it shows is the same in every form, lines keep to a width, and bytes look alike everywhere."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

import mpbridge
from mpbridge.common.tables import Column, Table, facts, size, table, unit_for
from mpbridge.precision.sync.plan import plan

PACKAGE = Path(next(iter(mpbridge.__path__)))
ROWS = [("model.params_dtype", "", "bf16", "resident parameters of a model with a long explanation"), ("ddp.grad_reduce_in_fp32", "", "true", "gradient buffers")]  # fmt: skip
DECIDED = table("decided", ("field", "before", "after", "why"), ROWS, whole=("field",), tones=["", "warn"], note="that is all")  # fmt: skip


def rich(shown: Table, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(shown)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("form", ["rich", "lines"])
@pytest.mark.parametrize("width", [40, 50, 60, 80, 120])
def test_no_line_is_wider_than_the_place_and_no_word_is_broken(form: str, width: int) -> None:
    lines = rich(DECIDED, width) if form == "rich" else DECIDED.lines(width)
    assert max(map(len, lines)) <= width
    words = {word.rstrip(";") for line in lines for word in line.split()}
    assert all(set(cell.split()) <= words for row in ROWS for cell in row)


def test_columns_turn_into_lines_and_one_that_says_nothing_is_left_out() -> None:
    wide, narrow, record = (DECIDED.lines(width) for width in (None, 60, 28))
    assert wide[1].split() == rich(DECIDED, 120)[2].split() == ["field", "after", "why"]
    assert narrow[2:4] == [
        "model.params_dtype       bf16",
        "    resident parameters of a model with a long explanation",
    ]
    assert record[1:3] == ["model.params_dtype  after:", "    bf16; why: resident"]


def test_a_table_without_rows_is_its_title() -> None:
    empty = table("none", ("a", "b"), [])
    assert empty.lines(80) == ["none"]
    assert "none" in "\n".join(rich(empty, 80))


def test_every_form_shows_the_same_cells() -> None:
    shown = table("t", ("name", Column(name="held", unit="bytes"), Column(name="share", unit="percent"), "x"), [("a|b", 85_524_480_000, 0.5, ("p", "q")), ("<b>", 0, "", None)])  # fmt: skip
    assert shown.texts() == [["a|b", "79.65 GiB", "50.00%", "p, q"], ["<b>", "", "", ""]]
    assert shown.lines()[1:] == ["name       held   share  x", "a|b   79.65 GiB  50.00%  p, q", "<b>"]
    assert shown.markdown().splitlines()[2] == r"| a\|b | 79.65 GiB | 50.00% | p, q |"
    assert "&lt;b&gt;" in shown.html()
    assert "<b>" in "\n".join(rich(shown, 100))
    assert "[bold]x[/bold]" in "\n".join(rich(facts("", {"label": "[bold]x[/bold]"}), 80))


def test_every_write_of_a_plan_has_a_row_and_overrides_say_how_to_keep_the_value() -> None:
    origin = {"ddp.grad_reduce_in_fp32": "the command line"}
    wanted = plan("bf16_mixed", model={}, optimizer={}, ddp={"grad_reduce_in_fp32": False}, origin=origin)
    lines = rich(wanted.table(), 150)
    assert all(write.name in "\n".join(lines) for write in wanted.writes)
    (row,) = [line for line in lines if line.strip().startswith("ddp.grad_reduce_in_fp32")]
    assert "the command line" in row
    assert "mixed_precision.grad_reduce_in_fp32=false" in row


def test_bytes_have_one_unit_for_a_figure_or_for_a_whole_output() -> None:
    assert [size(n) for n in (0, 1023, 1536, 3 * 2**20, 85_524_480_000)] == ["0 B", "1,023 B", "1.5 KiB", "3.0 MiB", "79.65 GiB"]  # fmt: skip
    assert unit_for(2**31).of(2**20) == "0.00"


def test_verbs_print_the_same_bytes_alike(cli) -> None:
    """At cfba8d0 an H100 had 79.6 GiB in `doctor` and 79.65 in `memory`, and a run needed 55.2 GiB in `recommend` and 55.16 in `memory`."""
    run = ["--config", "llama3_8b", "--target", "h100", "--world-size", "8"]
    found = re.search(r"([\d.]+) \+- [\d.]+ GiB of ([\d.]+)", cli("memory", *run, "--recipe", "bf16_mixed"))
    assert found is not None
    assert re.search(rf"^h100 .* {found[2]} GiB", cli("doctor", "--machines"), re.MULTILINE)
    assert re.search(rf" bf16_mixed .* {found[1]} GiB", cli("recommend", *run))
    assert re.search(r" \d+\.\d\d GiB \+- [\d.]+ [GM]iB, ", cli("layouts", *run, "--most", "1"))


def test_there_is_no_second_formatter_of_bytes_and_no_second_table() -> None:
    bytes_ = re.compile(r"(2 ?\*\* ?[123]0|1024|1e9|10\*\*9)[^\n]{0,6}:[.,\d]*f\}[^\n]{0,4} ?([KMGT]i?B\b)")
    tables = re.compile(r"rich\.table|<table>|' \| '\.join|\" \| \"\.join")
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if bytes_.search(text) or (tables.search(text) and path.name != "tables.py"):
            found.append(str(path.relative_to(PACKAGE)))
    assert found == []
