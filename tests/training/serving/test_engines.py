"""Engines' own code judges: what their matchers make of convert's lists, and what their loaders make of its folders. The figures of scripts/evidence/stacks, and the scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EVIDENCE = Path(__file__).parents[3] / "scripts" / "evidence"
HELD: dict[str, Any] = json.loads((EVIDENCE / "data" / "served.json").read_text())
INDISTINCT = ("DeepSeek-V3", "as convert writes it, first and last layer in BF16", "sglang", "modelopt")
"""SGLang takes a latent projection of one layer for all layers': no list of names says less."""


def test_engines_resolve_converts_lists_to_exactly_those_modules() -> None:
    rows = [row for row in HELD["lists"]["rows"] if row["list"].startswith("as convert")]
    assert len(rows) == 4 * 2 * 7
    wrong = [(row["model"], row["list"], row["engine"], row["method"]) for row in rows if row["wrong"]]
    assert wrong == [INDISTINCT]


def test_contract_says_of_every_list_what_the_engines_do() -> None:
    rows = HELD["lists"]["rows"]
    assert sum(bool(row["wrong"]) for row in rows) > 100  # lists that mean other modules than their author thinks
    assert [row for row in rows if row["differ"]] == []


def test_what_loads_holds_the_bytes_of_the_folder() -> None:
    rows = HELD["loading"]["rows"]
    assert len({row["model"] for row in rows}) == 3
    assert all("refused" in row or (row["equal"] and row["different"] == row["list"] == []) for row in rows), rows
    assert sum("refused" not in row for row in rows) > 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "sources"),
    [("served_lists.py", ("VLLM_SOURCE", "SGLANG_SOURCE")), ("served_loading.py", ("VLLM_SOURCE",))],
)
def test_the_figures_are_what_the_engines_give(script: str, sources: tuple[str, ...], tmp_path: Path) -> None:
    missing = [name for name in sources if not os.environ.get(name)]
    if missing:
        pytest.skip(f"{' and '.join(missing)}: no folder with the engine's Python files")
    code = f"import served_data, runpy; from pathlib import Path; served_data.DATA = Path({str(tmp_path / 'found.json')!r}); runpy.run_path({script!r}, run_name='__main__')"
    subprocess.run([sys.executable, "-c", code], cwd=EVIDENCE / "stacks", check=True, timeout=900)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {name: HELD[name] for name in found}
