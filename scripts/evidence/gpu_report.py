"""The report of scripts/gpu_check.sh as Markdown: `python scripts/evidence/gpu_report.py FOLDER` reads bench.json and tests.log there and prints."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def tests(log: str) -> str:
    """pytest's closing line, and every skip with its reason."""
    closing = [line.strip("= ") for line in log.splitlines() if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    skips = [f"- {line}" for line in log.splitlines() if line.startswith(("SKIPPED", "FAILED", "ERROR"))]
    return "\n".join([closing[-1] if closing else "no test ran", "", *skips])


def speeds(bench: dict) -> str:
    """One table per shape."""
    versions = ", ".join(f"{name} {version}" for name, version in bench["versions"].items())
    lines = [f"{bench['device']}, {bench['date']}, {versions}; BF16 matmul {bench['matmul_tflops']:.0f} TFLOP/s", ""]
    for shape, table in bench["shapes"].items():
        first = next(iter(table.values()))
        lines += [
            f"### {shape}",
            "",
            "| arm | tokens/s | model TFLOP/s | of matmul | of the first arm | peak GiB |",
            "|---|--:|--:|--:|--:|--:|",
        ]
        for name, row in table.items():
            tflops = row["model_flops_per_s"] / 1e12
            lines.append(
                f"| {name} | {row['tokens_per_s']:.0f} | {tflops:.0f} | {tflops / bench['matmul_tflops']:.1%} | "
                f"{row['tokens_per_s'] / first['tokens_per_s']:.3f} | {row['peak_gib']:.1f} |"
            )
        lines.append("")
        for name, row in table.items():
            kinds = ", ".join(
                f"{kind} {milliseconds:.1f}"
                for kind, milliseconds in sorted(row["kinds"].items(), key=lambda item: -item[1])
            )
            lines += [f"{name}: one step's GPU milliseconds by kind of kernel: {kinds}"] if kinds else []
        lines += [
            f"Start of the first arm: imports {bench['import_s']:.1f} s, process group {bench['process_group_s']:.1f} s, building {first['build_s']:.1f} s, first step {first['first_step_s']:.1f} s.",
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    """Prints the available parts and names the missing ones."""
    folder = Path(sys.argv[1])
    log, bench = folder / "tests.log", folder / "bench.json"
    print("# GPU check\n\n## Tests\n")
    print(tests(log.read_text()) if log.is_file() else "not run")
    agreement = folder / "agreement.log"
    print("\n## The emulation against Transformer Engine\n")
    print(agreement.read_text() if agreement.is_file() else "not run")
    print("\n## Speed and memory\n")
    print(speeds(json.loads(bench.read_text())) if bench.is_file() else "not measured")


if __name__ == "__main__":
    main()
