"""events.jsonl in the run's folder: one JSON object for every event of the run other than steps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mpbridge.files import opened_to_write
from mpbridge.report.console import rank, warn

EVENTS = "events.jsonl"


def record(training: Any, event: str, text: str, *, say: bool = True, **facts: Any) -> None:
    """Prints `text` and adds it to the run's events; non-finite numbers are written as words. A write error is reported on stderr."""
    if say:
        training.say(text)
    folder = training.run.logger.get("log_dir")
    if folder and rank() == 0:
        plain = {
            name: value if not isinstance(value, float) or math.isfinite(value) else str(value)
            for name, value in facts.items()
        }
        row = {"iteration": training.counters.iteration, "event": event, "text": text} | plain
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with opened_to_write(Path(folder) / EVENTS, append=True) as stream:
                stream.write(json.dumps(row) + "\n")
        except OSError as error:
            warn(f"{Path(folder) / EVENTS} cannot be written ({error.strerror}); the missing line: {json.dumps(row)}")
