"""JSON Schema, as far as the files of mpbridge/cli/schemas use it."""

from __future__ import annotations

from typing import Any

_KINDS: dict[str, Any] = {"null": type(None), "boolean": bool, "string": str, "number": (int, float), "array": (list, tuple), "object": dict}  # fmt: skip


def wrong(value: Any, schema: dict[str, Any], at: str = "answer") -> list[str]:
    """What does not hold, as sentences."""
    said = [kind for kind in schema["type"] if isinstance(value, _KINDS[kind]) and (kind != "number" or not isinstance(value, bool))]  # fmt: skip
    found = [] if said or not schema["type"] else [f"{at}: {type(value).__name__}, expected {schema['type']}"]
    if isinstance(value, list) and "items" in schema:
        found += [text for item in value for text in wrong(item, schema["items"], f"{at}[]")]
    if isinstance(value, dict) and "properties" in schema:
        found += [f"{at}.{name} is missing" for name in schema["required"] if name not in value]
        found += [f"{at}.{name} is in no schema" for name in value if name not in schema["properties"]]
    parts, rest = schema.get("properties", {}), schema.get("additionalProperties")
    for name, part in value.items() if isinstance(value, dict) else ():
        if name in parts or isinstance(rest, dict):
            found += wrong(part, parts.get(name, rest), f"{at}.{name}")
    return found
