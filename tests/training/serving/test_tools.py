"""Tools that make served folders quantize BF16 weights as `contract` says that they do: each rule in causes.py gives one tool's bytes, to the last code."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch

from tests.forked import ROOT
from tests.scripts import loaded

loaded("evidence/stacks/served_data")  # that the other imports
judged = loaded("evidence/stacks/served_bytes")

EQUAL = {
    ("blockwise, powers of two", "transformers FineGrainedFP8, ue8m0"),
    ("blockwise, powers of two", "vLLM online fp8_per_block, ue8m0"),
    ("MXFP8", "ModelOpt MXFP8"),
    ("MXFP8", "vLLM online mxfp8"),
    ("MXFP8", "torchao MX, RCEIL"),
}
"""Tools whose bytes are training's."""
SMALL = (256, 256)


@pytest.mark.parametrize("case", judged.CASES, ids=lambda case: f"{case.rule}-{case.tool}".replace(" ", "_"))
def test_a_tools_bytes_are_trainings_or_are_explained(case: Any) -> None:
    if not case.installed:
        pytest.skip(f"{case.package} is not installed")
    if case.package == "torchao" and not hasattr(torch, "float8_e8m0fnu"):
        pytest.skip(f"torchao's MX formats need a newer torch than {torch.__version__}")
    given = {name: weight[: SMALL[0], : SMALL[1]].contiguous() for name, weight in judged.weights().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        made = {name: case.make(weight) for name, weight in given.items()}
    found = judged.compare(case, judged.training(), judged.rule_of(case.rule), given, made)
    assert (found.codes == found.scales == 0 and not found.cause) == ((case.rule, case.tool) in EQUAL), found
    assert found.cause != "not explained", found


def test_the_figures_are_of_these_cases_and_explained() -> None:
    rows = json.loads((ROOT / "scripts" / "evidence" / "data" / "served.json").read_text())["bytes"]["rows"]
    assert [(row["rule"], row["tool"]) for row in rows] == [(case.rule, case.tool) for case in judged.CASES]
    assert {(row["rule"], row["tool"]) for row in rows if not row["cause"]} == EQUAL
    assert not any(row["cause"] == "not explained" for row in rows)
