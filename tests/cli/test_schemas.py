"""Every `--json` has a schema, and holds to it: here on runs of which the schemas were not made, and in every other test that prints JSON (tests/conftest.py)."""

from __future__ import annotations

import json

import pytest

from mpbridge.cli.main import verb_of, verbs
from mpbridge.cli.options import JSON
from mpbridge.cli.text import SCHEMA_VERSION, SCHEMAS
from tests.schemas import wrong

B200 = ("--target", "b200")
CASES = [
    ("check", "--config", "qwen3_30b_a3b", "--recipe", "mxfp8", *B200),
    ("check", "--config", "gpt_oss_120b", "--recipe", "nvfp4", *B200, "--world-size", "64"),
    ("check", "--config", "llama3_405b", "--recipe", "fp8_ds", "--target", "sm_90"),
    ("check", "--config", "moe_tiny", "--recipe", "fp32"),
    ("memory", "--config", "qwen3_30b_a3b", "--recipe", "nvfp4", *B200),
    ("memory", "--config", "llama3_405b", "--stages"),
    ("estimate", "--config", "qwen3_30b_a3b", "--recipe", "mxfp8", *B200),
    ("layouts", "--config", "llama3_70b", *B200, "--most", "2"),
    ("layouts", "--config", "llama3_405b", "--target", "l4", "--world-size", "8"),
    ("recommend", "--config", "moe_tiny", *B200),
    ("report", "RUN"), ("diagnose", "RUN"),
    ("words", "fp16"), ("list",), ("doctor", *B200), ("show", "bf16_with_mxfp8_mixed", "--layers", "8"),
    ("plan", "--recipe", "fp16", "optimizer.lr=1e-4"), ("compare", "fp32", "nvfp4"), ("export", "nvfp4", "--to", "torchtitan"), ("import", "--args", "--fp16"),
]  # fmt: skip


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_answers_hold_to_their_schema(words, cli, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "loss": 2.0}\n')
    answer = json.loads(cli(*(str(tmp_path) if word == "RUN" else word for word in words), "--json", code=(0, 1)))
    assert answer["schema_version"] == SCHEMA_VERSION
    assert wrong(answer, json.loads((SCHEMAS / f"{words[0]}.json").read_text())) == []


def test_every_verb_with_json_has_one_schema():
    printing = [verb for verb in verbs() if JSON in verb_of(verb).ARGUMENTS]
    assert sorted(path.stem for path in SCHEMAS.glob("*.json")) == sorted(printing)


def test_the_check_above_can_fail():
    schema = json.loads((SCHEMAS / "layouts.json").read_text())
    assert wrong({"layouts": 3, "more": 1}, schema) == ["answer.schema_version is missing", "answer.world_size is missing", "answer.target is missing", "answer.refused is missing", "answer.more is in no schema", "answer.layouts: int, expected ['array']"]  # fmt: skip
    words = {"type": ["object"], "additionalProperties": {"type": ["string"]}}
    assert wrong({"a": 1}, words) == ["answer.a: int, expected ['string']"]
    assert all(
        "description" in part
        for path in SCHEMAS.glob("*.json")
        for part in json.loads(path.read_text())["properties"].values()
    )
