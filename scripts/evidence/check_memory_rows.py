"""Compares `mpbridge memory` with GPU measurements and with runs that are known to have fitted.

python scripts/evidence/check_memory_rows.py            # the figures
python scripts/evidence/check_memory_rows.py --misses   # also lists every row outside of its goal
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable

import measured
import published

from mpbridge.planning.memory.activations import attention_kernel
from mpbridge.planning.memory.by_role import memory, verdict

MIB, GIB = 2**20, 2**30


class Compared:
    """One measured row with its prediction."""

    def __init__(self, row: dict) -> None:
        run = measured.run_of(row)
        found = memory(run.policy, run.facts, rank=run.facts.parallel.world_size - 1)
        self.row = row
        self.kernel = attention_kernel(run.facts)
        self.live, self.peak = found.states + found.communication, found.total
        self.big = row["peak"] > 2 * GIB

    @property
    def live_error(self) -> float:
        return self.live / self.row["allocated"] - 1

    @property
    def peak_error(self) -> float:
        return self.peak / self.row["peak"] - 1


def share(inside: Iterable[bool]) -> str:
    found = list(inside)
    return f"{sum(found):3d} of {len(found):3d} ({sum(found) / max(1, len(found)):.0%})"


def compared() -> tuple[list[Compared], Counter[str]]:
    """(rows that are compared, number of excluded rows by reason)."""
    rows, apart = [], Counter[str]()
    for row in measured.rows():
        why = measured.apart(row)
        if why:
            apart[why] += 1
        else:
            rows.append(Compared(row))
    return rows, apart


def figures(rows: list[Compared]) -> dict[str, list[tuple[Compared, bool]]]:
    """Description of each figure -> its rows, and whether each is within the goal."""
    fused = [one for one in rows if one.kernel == "fused"]
    other = [one for one in rows if one.kernel != "fused"]
    return {
        "peak within 10 %, fused attention, above 2 GiB (goal 90 %)": [
            (one, abs(one.peak_error) <= 0.10) for one in fused if one.big
        ],
        "peak within 150 MiB, fused attention, toys (goal 90 %)": [
            (one, abs(one.peak - one.row["peak"]) <= 150 * MIB) for one in fused if not one.big
        ],
        "peak within 15 %, unfused or local attention (goal 90 %)": [
            (one, abs(one.peak_error) <= 0.15) for one in other
        ],
        "live bytes within 2 %, above 2 GiB (goal 90 %)": [
            (one, abs(one.live_error) <= 0.02) for one in rows if one.row["allocated"] > 2 * GIB
        ],
        "live bytes within 150 MiB, toys": [
            (one, abs(one.live - one.row["allocated"]) <= 150 * MIB) for one in rows if one.row["allocated"] <= 2 * GIB
        ],
    }


def measured_rows(misses: bool) -> None:
    rows, apart = compared()
    print(f"{len(rows)} measured rows compared; excluded: " + ", ".join(f"{n} {why}" for why, n in apart.most_common()))
    for words, found in figures(rows).items():
        print(f"  {words:62s} {share(ok for _, ok in found)}")
        for one in [one for one, ok in found if misses and not ok]:
            print(
                f"      {one.row['case']:100s} {one.row['machine']:6s} live {one.live / MIB:8.0f} / {one.row['allocated'] / MIB:8.0f}  peak {one.peak / MIB:8.0f} / {one.row['peak'] / MIB:8.0f}  {one.peak_error:+.0%}"
            )


def published_runs(rows: list[dict], words: str, misses: bool) -> None:
    said: Counter[str] = Counter()
    wrong = []
    for row in rows:
        run = published.run_of(row)
        found = memory(run.policy, run.facts)
        answer = verdict(found, run.facts.machine.memory_bytes)
        said[answer] += 1
        if answer == "does not fit" or (misses and answer == "tight"):
            wrong.append((answer, row, found, run.facts.machine.memory_bytes))
    total = sum(said.values())
    print(f"{total} {words}")
    for answer in ("fits", "tight", "does not fit"):
        print(f"  {answer:14s} {said[answer]:3d} ({said[answer] / total:.0%})")
    for answer, row, found, available in wrong:
        note = " (the table is wrong)" if (row["id"], row["release"]) in published.WRONG else ""
        print(
            f"    {answer}: {row['release']} {row['model']} {row['machine']} {row['precision']} tp {row['tensor']} pp {row['pipeline']} ep {row['expert']} mbs {row['micro_batch']}: states {found.states / GIB:.1f}, needed {found.needed / GIB:.1f} +- {found.band / GIB:.1f} of {available / GIB:.1f} GiB{note}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--misses", action="store_true", help="list the rows outside of their goal")
    args = parser.parse_args()
    measured_rows(args.misses)
    goals = "which all fitted (goals: none refused except two that are wrong in the table; fits at least 60 %)"
    published_runs(published.priced(), f"published runs, {goals}", args.misses)
    published_runs(
        published.unfitted(), "published runs of later releases and of Llama 3.1 405B, which all fitted", args.misses
    )


if __name__ == "__main__":
    main()
