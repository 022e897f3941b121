"""Fuzzes the readers of files from untrusted sources, guided by coverage: python scripts/evidence/fuzz_readers.py READER [SECONDS] [CORPUS].

Needs atheris (pip install atheris). A reader may refuse its input with an MpbridgeError; any other exception, a hang or a gigabyte of memory is a finding.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["mpbridge"]):
    from mpbridge.common.errors import MpbridgeError
    from mpbridge.common.report.curves import read_curves
    from mpbridge.common.report.history import read_history
    from mpbridge.common.safe_unpickler import read as unpickle
    from mpbridge.precision.registry import get_mixed_precision_config
    from mpbridge.settings.container import ConfigContainer
    from mpbridge.settings.huggingface.folder import tensors
    from mpbridge.settings.huggingface.section import model_section

READERS: Mapping[str, tuple[str, Callable[[Path], object], bytes]] = {
    "recipe": ("recipe.yaml", lambda file: get_mixed_precision_config(str(file), code=False), b"extends: bf16_mixed\nfp8: hybrid\n"),
    "run": ("run.yaml", lambda file: ConfigContainer.load(file).resolved(1), b"model: {num_layers: 2, hidden_size: 64}\nmixed_precision: bf16_mixed\n"),
    "metrics": ("metrics.jsonl", read_curves, b'{"iteration": 1, "loss": 3.0, "grad_norm": "nan"}\n'),
    "audits": ("precision.json", read_history, b'{"audit": {"history": [{"step": 1, "ok": true, "facts": {"a": ["b", "c", "ok"]}}]}}'),
    "safetensors": ("model.safetensors", lambda file: tensors(file.parent), b'\x40\0\0\0\0\0\0\0{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}          \0\0'),
    "huggingface": ("config.json", lambda file: model_section(file.parent), b'{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}'),
    "pickle": ("data.pkl", lambda file: unpickle(file.read_bytes(), lambda name, args: (name, args)), b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01K\x01s."),
}  # fmt: skip
"""Reader -> the name of its file, the call, and an input to start from."""


def main() -> None:
    """Fuzzes one reader for some seconds; libFuzzer reports what it found and leaves the input in the working directory."""
    name, seconds, corpus = (sys.argv[1:] + ["60", ""][len(sys.argv) - 2 :])[:3]
    file_name, reader, start = READERS[name]
    folder = Path(tempfile.mkdtemp(prefix="fuzz."))
    file = folder / file_name
    seeds = Path(corpus or tempfile.mkdtemp(prefix="fuzz-corpus."))
    (seeds / "start").write_bytes(start)

    def once(data: bytes) -> None:
        file.write_bytes(data)
        with contextlib.suppress(MpbridgeError):
            reader(file)

    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=1024", "-max_len=4096", str(seeds)], once)  # fmt: skip
    atheris.Fuzz()


if __name__ == "__main__":
    main()
