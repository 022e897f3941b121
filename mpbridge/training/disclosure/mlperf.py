"""The nine keys with which MLPerf Training 6.1 asks for precision and parallel sizes, written by the library mlperf-logging.

Source: mlperf-logging 4.1.68, compliance_checker/training_6.1.0/common.yaml.
"""

from __future__ import annotations

import io
import logging
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpbridge.common.errors import BadValue, Refused
from mpbridge.common.files import lines_of, write
from mpbridge.common.shipped import install
from mpbridge.training.disclosure.evidence import Evidence

WORDS = {"bf16": "bfloat16"}
"""Precisions that MLPerf spells in another way. It has no word for a scaling, which goes into the metadata."""
PRECISIONS = {part: f"lowest_numerical_precision_in_{part}" for part in ("linear", "attn", "comm")}
SIZES = ("tensor", "pipeline", "context", "expert")


def keys_of(evidence: Evidence) -> dict[str, tuple[Any, dict[str, Any]]]:
    """MLPerf's key -> (value, metadata). Raises Refused for what no audit saw, BadValue if the micro-batch size was not recorded."""
    data = evidence.data
    if "micro_batch_size" not in data:
        raise BadValue(f"{evidence.path} does not record micro_batch_size: an older mpbridge wrote it; run it again")
    common = {"recipe": data["recipe"], "policy": data["fingerprint"], "realization": data["realization"]}
    keys: dict[str, tuple[Any, dict[str, Any]]] = {}
    for part, lowest in evidence.lowest().items():
        told = asdict(lowest) | {"audits": len(evidence.audits), "observed": not lowest.unobserved}
        keys[PRECISIONS[part]] = (WORDS.get(told.pop("word"), lowest.word), common | told)
    for name in SIZES:
        keys[f"{name}_parallelism"] = (int(data["parallel"][name] or 1), common)
    keys["micro_batch_size"] = (int(data["micro_batch_size"]), common)
    keys["config_filename"] = (evidence.path.name, common)
    return keys


def write_mllog(evidence: Evidence, log: Path) -> dict[str, Any]:
    """Appends the keys to a benchmark's log, or to a new file; returns key -> value. Raises Refused if the log already has one, since each is allowed once."""
    try:
        from mlperf_logging.mllog.mllog import MLLogger
    except ImportError:
        raise Refused(f"--mllog needs the package mlperf-logging: {install('disclose')}") from None
    keys = keys_of(evidence)
    if log.exists():
        there = [key for key in keys if any(f'"key": "{key}"' in line for line in lines_of(log))]
        if there:
            raise Refused(f"{log} already has {', '.join(there)}; MLPerf allows each key once: name another file")
    lines, logger = io.StringIO(), logging.Logger("mpbridge.mllog")
    logger.addHandler(logging.StreamHandler(lines))
    writer = MLLogger(logger, root_dir=re.escape(str(Path(__file__).parents[3])))
    for key, (value, metadata) in keys.items():
        writer.event(key=key, value=value, metadata=metadata)
    write(log, lines.getvalue(), append=True)
    return {key: value for key, (value, _) in keys.items()}
