"""Which megatron-core is here, which description stands for it, and what it lacks to be imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpbridge.common.errors import Refused
from mpbridge.common.facts import ModelShape, RunFacts, Versions
from mpbridge.planning.rules import table
from mpbridge.precision.megatron_spec.versions import described, missing, nearest
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.precision.sync.targets import same

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("have", "stands"), [(None, 0), ("0.15", 0), ("0.16.1", 0), ("0.18", 0), ("0.20.0", 1), ("0.21", 1)]
)
def test_the_newest_description_that_is_not_newer_stands_for_a_version(have: str | None, stands: int) -> None:
    assert nearest(have) == described()[stands]


def test_a_source_tree_on_the_path_is_the_version_that_counts(tmp_path: Path) -> None:
    place = tmp_path / "megatron" / "core" / "package_info.py"
    place.parent.mkdir(parents=True)
    place.write_text("MAJOR = 0\nMINOR = 19\nPATCH = 2\nPRE_RELEASE = 'rc1'\n", encoding="utf-8")
    code = "from mpbridge.common.probe import installed; print(installed().megatron_core)"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0.19.2rc1"


def test_a_missing_package_is_one_clear_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert missing("0.16.1") == missing(None) == ()
    assert missing("0.20.0") == ("triton",)
    monkeypatch.setattr(table, "installed", lambda: Versions(megatron_core="0.20.0"))
    monkeypatch.setattr(table, "this_machine", lambda: None)
    shape = ModelShape(num_layers=1, hidden_size=8, num_attention_heads=1, ffn_hidden_size=8, num_query_groups=1, kv_channels=8, vocab_size=8, seq_length=8)  # fmt: skip
    with pytest.raises(Refused, match="cannot be imported without triton: pip install triton"):
        table.require_here(resolve(get_mixed_precision_config("bf16")), RunFacts(shape=shape))


def test_a_tuple_and_a_list_are_the_same_value() -> None:
    assert same((), [])
    assert same(["a"], ("a",))
    assert not same((), ["a"])
    assert not same((1, 2), (1, 3))
