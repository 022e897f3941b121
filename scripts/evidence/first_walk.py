"""Walks the new user's path of docs/getting_started.md: runs every command of its transcript in a fresh folder, as it stands, and holds what comes out against what the page shows.

    python scripts/evidence/first_walk.py [--until train] [--folder DIR]

'...' on the page stands for any text. Of what training prints, other numbers are no difference. Ctrl-C is sent where the page shows it. `--until train`: without training, in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "getting_started.md"
SECTION = re.compile(r"^## A model of yours.*?(?=^## )", re.DOTALL | re.MULTILINE)
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attention_bias": False, "tie_word_embeddings": False, "initializer_range": 0.02,
}  # fmt: skip
NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
TRAINED = ("train", "report", "resume-check")
"""Verbs whose numbers come from training."""


def steps() -> Iterator[tuple[str, str]]:
    """(command, what the page shows of its output)."""
    found = SECTION.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    for block in re.findall(r"^```text\n(.*?)^```$", found[0], re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            yield command, shown


def differs(words: list[str], shown: str, came: str) -> bool:
    """Whether the output is not what the page shows."""
    pattern = r"[\s\S]*?".join(re.escape(piece.strip("\n")) for piece in shown.strip("\n").split("..."))
    if words[1] in TRAINED:
        pattern = re.sub(
            NUMBER.pattern.replace(".,", r"\\.,").replace("+-", r"+\\-"), lambda _: NUMBER.pattern, pattern
        )
    return re.fullmatch(rf"\s*{pattern}\s*", came) is None


def run(words: list[str], place: Path, stop: bool, here: bool) -> str:
    """The output of a command; stop: sends Ctrl-C once it has taken twenty steps."""
    if here:
        from mpbridge.cli.main import main

        with contextlib.chdir(place), contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            main(words[1:])
        return out.getvalue()
    told = {name: text for name, text in os.environ.items() if name != "COLUMNS"} | {"PYTHONUNBUFFERED": "1"}
    # warnings of torch about this machine's CUDA are not the run's
    command = [sys.executable, "-W", "ignore", "-m", "mpbridge", *words[1:]]
    with subprocess.Popen(
        command, cwd=place, env=told, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if stop and line.startswith("step 20/"):
                process.send_signal(signal.SIGINT)
    return "".join(lines)


def walk(folder: Path, until: str | None = None) -> list[str]:
    """Walks the path in `folder`, which becomes full; until: the verb before which it ends. Returns the commands whose output differs, with it."""
    (folder / "llama-70b").mkdir(parents=True)
    (folder / "llama-70b" / "config.json").write_text(json.dumps(LLAMA_70B))
    place, wrong = folder, []
    for command, shown in steps():
        words = shlex.split(command)
        while words[0] == "cd":
            place = (place / words[1]).resolve()
            words = words[3:]
        if words[1] == until:
            break
        start = time.monotonic()
        came = run(words, place, "SIGINT" in shown, until is not None)
        if differs(words, shown, came):
            wrong.append(f"$ {command}\n{came}")
        if until is None:
            took = f"{time.monotonic() - start:.1f} s{', NOT as the page shows' * differs(words, shown, came)}"
            print(f"$ {command}\n{came}({took})\n", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--until", metavar="VERB")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        wrong = walk(args.folder or Path(temporary), args.until)
    print("\n".join(wrong) or "every output is what the page shows")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
