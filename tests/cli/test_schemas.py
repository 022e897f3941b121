"""`--json` of the verbs whose form is documented holds to its schema, on other runs than those of which the schemas were made."""

from __future__ import annotations

import json

import pytest

from mpbridge.cli.main import main
from mpbridge.cli.text import SCHEMA_VERSION, SCHEMAS

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
    ("report", "RUN"),
]  # fmt: skip


def wrong(value, schema, at="answer"):
    """What does not hold, as sentences: the part of JSON Schema that these files use."""
    kinds = {"null": type(None), "boolean": bool, "string": str, "number": (int, float), "array": list, "object": dict}
    said = [
        kind
        for kind in schema["type"]
        if isinstance(value, kinds[kind]) and (kind != "number" or not isinstance(value, bool))
    ]
    found = [] if said or not schema["type"] else [f"{at}: {type(value).__name__}, expected {schema['type']}"]
    if isinstance(value, list) and "items" in schema:
        found += [text for item in value for text in wrong(item, schema["items"], f"{at}[]")]
    if isinstance(value, dict) and "properties" in schema:
        found += [f"{at}.{name} is missing" for name in schema["required"] if name not in value]
        found += [f"{at}.{name} is in no schema" for name in value if name not in schema["properties"]]
        known = {name: part for name, part in schema["properties"].items() if name in value}
        found += [text for name, part in known.items() for text in wrong(value[name], part, f"{at}.{name}")]
    return found


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_answers_hold_to_their_schema(words, capsys, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "loss": 2.0}\n')
    main([*(str(tmp_path) if word == "RUN" else word for word in words), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema_version"] == SCHEMA_VERSION
    assert wrong(answer, json.loads((SCHEMAS / f"{words[0]}.json").read_text())) == []


def test_the_check_above_can_fail():
    schema = json.loads((SCHEMAS / "layouts.json").read_text())
    assert wrong({"layouts": 3, "more": 1}, schema) == ["answer.schema_version is missing", "answer.refused is missing", "answer.more is in no schema", "answer.layouts: int, expected ['array']"]  # fmt: skip
    assert all(
        "description" in part
        for path in SCHEMAS.glob("*.json")
        for part in json.loads(path.read_text())["properties"].values()
    )
