"""Fingerprints that an earlier commit wrote are read, and every pair of them gets the verdict that it got then, with the same losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpbridge.training.checkpoint.verdict import Fingerprint, verdict

OLD = json.loads((Path(__file__).parents[2] / "golden" / "fingerprints_ce54c4a.json").read_text())
PRINTS = {name: Fingerprint.from_data(data) for name, data in OLD["fingerprints"].items()}


@pytest.mark.parametrize("saved", PRINTS)
def test_the_verdict_is_what_it_was(saved: str) -> None:
    verdicts = [verdict(PRINTS[saved], wanted) for wanted in PRINTS.values()]
    found = ["; ".join([one.kind, *one.lost]) for one in verdicts]
    assert list(map(_plain, found)) == [_plain(OLD["texts"][index]) for index in OLD["verdicts"][saved]]


def _plain(text: str) -> str:
    # that commit spoke of remainders where there were none: FP16 main weights, and those that Megatron-FSDP holds
    return text.replace("the 16 remainder bits of", "bits of")


@pytest.mark.parametrize("saved", PRINTS)
def test_the_policy_keeps_its_fingerprint_and_the_layout_says_who_keeps_what(saved: str) -> None:
    again = PRINTS[saved].as_data()
    assert again["sha256"] == OLD["fingerprints"][saved]["sha256"]
    assert {"params", "exp_avg"} <= set(again["layout"]["roles"])
