"""Where the judges of served folders find an engine's sources, and the file that holds what they measured; shared by served_bytes.py, served_lists.py and served_loading.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "scripts" / "evidence" / "data" / "served.json"


def record(**sections: Any) -> None:
    """Replaces sections of the file of figures, from which scripts/generate/tables.py makes the tables of docs/serving.md."""
    held = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    DATA.write_text(json.dumps(dict(sorted({**held, **sections}.items())), indent=1) + "\n", encoding="utf-8")


def vllm() -> str:
    """Release and commit of the Python files of vLLM in the folder VLLM_SOURCE, which become importable; '': there are none. No compiled part is needed."""
    source = os.environ.get("VLLM_SOURCE", "")
    if not source or not (Path(source) / "vllm" / "__init__.py").is_file():
        return ""
    os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR", VLLM_USE_DEEP_GEMM="0")
    if source not in sys.path:
        sys.path.insert(0, source)
    from vllm import _version

    return f"{_version.__version__}, commit {(_version.__commit_id__ or 'unknown').removeprefix('g')}"
