"""Where the judges of served folders find an engine's sources, and the file that holds what they measured; shared by served_bytes.py, served_lists.py and served_loading.py."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "scripts" / "evidence" / "data" / "served.json"


def record(**sections: Any) -> None:
    """Replaces sections of the file of figures, from which scripts/generate/tables.py makes the tables of docs/serving.md."""
    held = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    DATA.write_text(_text({**held, **sections}), encoding="utf-8")


def _text(sections: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    made = []
    for name, section in sorted(sections.items()):
        head = "".join(f"{json.dumps(key)}: {json.dumps(value)}, " for key, value in section.items() if key != "rows")
        rows = ",\n  ".join(json.dumps(row) for row in section["rows"])
        made.append(f' {json.dumps(name)}: {{{head}"rows": [\n  {rows}\n ]}}')
    return "{\n" + ",\n".join(made) + "\n}\n"


def vllm() -> str:
    """Release and commit of the Python files of vLLM in the folder VLLM_SOURCE, which become importable; '': there are none. No compiled part is needed."""
    source = os.environ.get("VLLM_SOURCE", "")
    if not source or not (Path(source) / "vllm" / "__init__.py").is_file():
        return ""
    os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR", VLLM_USE_DEEP_GEMM="0")
    if source not in sys.path:
        sys.path.insert(0, source)
    return version(Path(source) / "vllm")


def version(package: Path) -> str:
    """Release and commit that an engine's sources name; of a checkout that was never built: its folder's name."""
    file = package / "_version.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    release = re.search(r"^__version__ = .*?'([^']+)'", text, re.MULTILINE)
    commit = re.search(r"^__commit_id__ = .*?'g?([0-9a-f]+)'", text, re.MULTILINE)
    return (release[1] if release else package.parent.name) + (f", commit {commit[1]}" if commit else "")
