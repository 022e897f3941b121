"""CPU time of `import mpbridge`, `mpbridge list` and `mpbridge check`, each in fresh interpreters, and whether torch was loaded.

    python scripts/evidence/bench_start.py [--runs N]

For comparison, also a bare interpreter (the cost of Python itself) and the same command again (the A/A ratio).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERB = "import sys; from mpbridge.cli.main import main; main({})"
LIST = VERB.format(["list"])
CHECK, OTHER = (
    VERB.format(["check", "--config", name, "--target", "h100"]) for name in ("qwen3_235b_a22b", "deepseek_v3_671b")
)
"""The shipped configuration that takes longest, and the largest: layouts and recipes are searched."""
ARMS = {
    "bare interpreter": "pass",
    "import mpbridge": "import mpbridge",
    "mpbridge list": LIST,
    "mpbridge list, again": LIST,
    "mpbridge check": CHECK,
    "check, DeepSeek-V3": OTHER,
}
GOALS = {"import mpbridge": 0.15, "mpbridge list": 0.15, "mpbridge check": 0.5, "check, DeepSeek-V3": 0.5}
"""Seconds."""


def cpu_seconds(code: str) -> float:
    """User and system time of one fresh interpreter that runs `code`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Runs the benchmark and prints the times; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    for code in ARMS.values():
        # the first run writes the .pyc files
        cpu_seconds(code)
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(runs):
        for name, code in ARMS.items():
            seconds[name].append(cpu_seconds(code))
    for name, values in seconds.items():
        print(f"{name:<22} {statistics.median(values):6.3f} s of CPU (median of {runs}; fastest {min(values):.3f})")
    again = statistics.median(
        a / b for a, b in zip(seconds["mpbridge list, again"], seconds["mpbridge list"], strict=True)
    )
    print(f"{'A/A':<22} {again:6.3f}")
    loaded = "sys.exit(bool({'torch', 'megatron', 'numpy'} & set(sys.modules)))"
    heavy = any(
        subprocess.run(
            [sys.executable, "-c", f"{code}; {loaded}"], cwd=ROOT, stdout=subprocess.DEVNULL, check=False
        ).returncode
        for code in (LIST, CHECK, OTHER)
    )
    print("torch, megatron, numpy " + ("LOADED" if heavy else "not loaded"))
    slow = [name for name, goal in GOALS.items() if statistics.median(seconds[name]) > goal]
    return 1 if slow or heavy else 0


if __name__ == "__main__":
    sys.exit(main())
