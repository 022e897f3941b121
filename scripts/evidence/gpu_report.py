"""The report of scripts/gpu_check.sh as Markdown: `python scripts/evidence/gpu_report.py FOLDER` reads what its steps have written there so far and prints."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

ENDED = re.compile(r"(tests/\S+::.+) (PASSED|FAILED|ERROR|SKIPPED)\b")
"""A line of `pytest -v`: the test and how it ended."""


def tests(log: str) -> str:
    """pytest's closing line, and every skip with its reason; of a run that was stopped, what had ended by then."""
    lines = log.splitlines()
    closing = [line.strip("= ") for line in lines if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    skips = [f"- {line}" for line in lines if line.startswith(("SKIPPED", "FAILED", "ERROR"))]
    if closing or not (ended := [found for line in lines if (found := ENDED.match(line))]):
        return "\n".join([closing[-1] if closing else "no test ran", "", *skips])
    counts = Counter(found[2].lower() for found in ended)
    stopped = f"stopped; by then {', '.join(f'{count} {word}' for word, count in counts.items())}"
    return "\n".join([stopped, "", *(f"- {found[2]} {found[1]}" for found in ended if found[2] in ("FAILED", "ERROR"))])


def speeds(bench: dict) -> str:
    """One table per shape."""
    versions = ", ".join(f"{name} {version}" for name, version in bench["versions"].items())
    lines = [f"{bench['device']}, {bench['date']}, {versions}; BF16 matmul {bench['matmul_tflops']:.0f} TFLOP/s", ""]
    for shape, table in bench["shapes"].items():
        first = next(iter(table.values()))
        lines += [
            f"### {shape}",
            "",
            "| arm | tokens/s | model TFLOP/s | of matmul | of the first arm | peak GiB | predicted GiB |",
            "|---|--:|--:|--:|--:|--:|--:|",
        ]
        for name, row in table.items():
            tflops = row["model_flops_per_s"] / 1e12
            lines.append(
                f"| {name} | {row['tokens_per_s']:.0f} | {tflops:.0f} | {tflops / bench['matmul_tflops']:.1%} | "
                f"{row['tokens_per_s'] / first['tokens_per_s']:.3f} | {row['peak_gib']:.1f} | "
                f"{'' if row['predicted_gib'] is None else format(row['predicted_gib'], '.1f')} |"
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


def steps(table: str) -> str:
    """What was run, how it ended and how long it took."""
    lines = ["| step | ended | seconds | limit |", "|---|---|--:|--:|"]
    for name, code, took, limit in {row.split("\t")[0]: row.split("\t") for row in table.splitlines()}.values():
        said = {"0": "done", "124": "stopped at its limit", "137": "killed at its limit"}.get(code, f"failed ({code})")
        lines.append(f"| {name} | {said} | {took} | {limit} |")
    return "\n".join(lines)


def fenced(log: str, words: tuple[str, ...]) -> str:
    """The lines of a log with one of the words."""
    kept = [line.rstrip() for line in log.splitlines() if any(word in line for word in words)]
    return "\n".join(["```text", *(kept or log.splitlines()[-5:]), "```"])


SECTIONS = (
    ("Transformer Engine's kernels against those played on a CPU", "kernels.log", lambda text: fenced(text, ("equal", "only on one side"))),
    ("Audits", "audits.log", lambda text: fenced(text, ("last complete one", "live audit of", "not observed:", "unverified", "broken", "refused", "Error"))),
    ("Speed and memory", "speed.json", lambda text: speeds(json.loads(text))),
    ("Tests", "tests.log", tests),
    ("The emulation against Transformer Engine", "agreement.log", str),
    ("Speed, by kind of kernel", "profile.json", lambda text: speeds(json.loads(text))),
)  # fmt: skip
"""Title, the file that a step writes, and how it is shown."""


def main() -> None:
    """Prints the available parts and names the missing ones."""
    folder = Path(sys.argv[1])
    print("# GPU check\n")
    if (folder / "steps.tsv").is_file():
        print(steps((folder / "steps.tsv").read_text()))
    for title, name, show in SECTIONS:
        file = folder / name
        print(f"\n## {title}\n\n{show(file.read_text()) if file.is_file() else 'not run'}")


if __name__ == "__main__":
    main()
