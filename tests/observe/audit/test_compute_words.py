"""What a row of computed dtypes says was promised."""

from __future__ import annotations

from mpbridge.observe.audit.compute import _told


def test_a_row_names_every_dtype_that_is_accepted() -> None:
    found = _told("norms", [[("norm", ("bf16", "fp32"), ("fp32",))]], [[]])
    assert (found.promised, found.found, found.ok) == ("bf16 or fp32", "fp32", True)
    assert not _told("norms", [[("norm", ("bf16", "fp32"), ("fp16",))]], [[]]).ok
