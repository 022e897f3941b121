"""`check` and `layouts` give one answer about the same run: the layout that check offers is the one that layouts lists first."""

from __future__ import annotations

import json
import pathlib

import pytest

WORLDS = {
    "deepseek_v3_671b": (1024, "b200"), "gpt_oss_120b": (64, "b200"), "llama3_405b": (512, "gb200"), "llama3_70b": (64, "h100"),
    "qwen3_235b_a22b": (256, "h100"), "qwen3_30b_a3b": (64, "h100"), "nemotron_3_nano": (32, "h100"), "nemotron_3_super": (64, "b200"),
}  # fmt: skip
"""Of the others a small world."""
KINDS = ("gpt_tiny", "llama3_8b", "llama3_70b", "gpt_oss_120b", "nemotron_3_nano", "deepseek_v3_671b")
"""One of each kind of model; the rest of the configurations are slow."""


OTHERS = sorted({path.stem for path in pathlib.Path("configs").glob("*.yaml")} - {*KINDS})


@pytest.mark.parametrize("config", [*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_check_offers_the_layout_that_layouts_lists_first(config, cli):
    world, target = WORLDS.get(config, (8, "h100"))
    where = ["--config", config, "--world-size", str(world), "--target", target, "--json"]
    mine = json.loads(cli("check", *where, code=(0, 1)))
    listed = json.loads(cli("layouts", *where, "--most", "1", code=(0, 1)))["layouts"]
    offered = [other["time"]["seconds"] for other in mine["others"] if "--recipe" not in other["settings"]]
    best = [one["seconds"] for one in listed if one["answer"] == "fits"]
    if mine["ok"] and mine["fit"]["answer"] == "fits":
        # what is not faster by more than the band is not offered
        _, high = mine["time"]["span"]
        best = [one for one in best if one * high < mine["time"]["seconds"] ** 2]
    if offered or best:
        assert offered[:1] == pytest.approx(best)
