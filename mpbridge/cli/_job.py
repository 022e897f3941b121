"""Validates the options of `launch` before Slurm sees the job, and reports all faults at once."""

from __future__ import annotations

import argparse
import re

LONGEST_NOTICE = 65535
"""Maximum seconds that Slurm accepts for --signal (man sbatch)."""
OURS = {
    "nodes": "--nodes", "N": "--nodes", "time": "--time", "t": "--time", "signal": "--notice", "job-name": "--name", "J": "--name",
    "gpus-per-node": "--gpus-per-node", "gpus": "--gpus-per-node", "G": "--gpus-per-node", "gres": "--gpus-per-node",
    "ntasks": "--gpus-per-node", "n": "--gpus-per-node", "ntasks-per-node": "--gpus-per-node",
}  # fmt: skip
"""sbatch options for which this command has its own option."""
NEVER = {
    "no-requeue": "the run resumes by being requeued",
    "requeue": "it is already set",
    "open-mode": "the output of every start is kept",
    "array": "a run is a single job",
    "a": "a run is a single job",
    "wrap": "the job runs the generated script",
}
_UNITS = {"": 60, ":": 60, "::": 3600}
"""Number of colons in a time limit without days -> seconds per unit of its first number: minutes, minutes:seconds, hours:minutes:seconds."""


def job_faults(args: argparse.Namespace) -> list[str]:
    """Everything that is wrong with the options of `launch`."""
    faults = [
        f"--{name.replace('_', '-')} {value}: expected at least {least}"
        for name, least in (("nodes", 1), ("gpus_per_node", 1), ("notice", 1), ("retries", 0))
        if (value := getattr(args, name)) < least
    ]
    if args.notice > LONGEST_NOTICE:
        faults.append(f"--notice {args.notice}: Slurm accepts at most {LONGEST_NOTICE} seconds")
    if not re.fullmatch(r"[\w.+@:-]{1,200}", args.name):
        faults.append(f"--name {args.name!r}: expected letters, digits and . _ + @ : -")
    faults += [*_time_faults(args.time, args.notice), *_image_faults(args.image, args.mount)]
    for option in args.slurm:
        faults += _option_faults(option)
    return faults


def _time_faults(given: str | None, notice: int) -> list[str]:
    if given is None:
        return []
    seconds = limit_seconds(given)
    if seconds is None:
        return [f"--time {given!r}: expected minutes, minutes:seconds, hours:minutes:seconds or days-hours[:minutes[:seconds]], as in 4:00:00"]  # fmt: skip
    if seconds <= notice:
        return [f"--time {given} is {seconds} seconds, so --notice {notice} would come before the run could begin: give more time, or a shorter notice"]  # fmt: skip
    return []


def limit_seconds(text: str) -> int | None:
    """Seconds of a time limit as sbatch reads it (man sbatch, --time); None if it is invalid."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if (dash and not days.isdecimal()) or not 1 <= len(parts) <= 3 or not all(map(str.isdecimal, parts)):
        return None
    numbers = [int(part) for part in parts]
    within = 0
    unit = 3600 if dash else _UNITS[":" * (len(parts) - 1)]
    for number in numbers:
        within, unit = within + number * unit, unit // 60
    return 86400 * int(days or 0) + within


def _image_faults(image: str | None, mounts: list[str]) -> list[str]:
    if image is None:
        return [f"--mount {mounts[0]} without --image: mounts apply only to a container"] if mounts else []
    faults = [
        f"--mount {mount!r}: expected FROM:TO, two absolute folders without a comma"
        for mount in mounts
        if not re.fullmatch(r"/[^:,\s]*:/[^:,\s]*(:[\w+]+)?", mount)
    ]
    if not image.strip() or re.search(r"\s", image):
        return [*faults, f"--image {image!r}: expected [REGISTRY#]NAME[:TAG], or a squashfs file"]
    # pyxis would look for that image on Docker Hub, on the node, after the wait in the queue
    first, slash, rest = image.partition("/")
    is_file = image.endswith((".sqsh", ".squashfs")) or not first or first.startswith(".")
    if slash and "#" not in image and not is_file and ("." in first or ":" in first or first == "localhost"):
        faults.append(f"--image {image}: expected --image {first}#{rest}: pyxis separates the registry with #")
    return faults


def _option_faults(option: str) -> list[str]:
    name, _, value = option.lstrip("-").partition("=")
    if not re.fullmatch(r"[A-Za-z][\w-]*", name) or "\n" in value or (" " in value and value[:1] not in "'\""):
        return [f"--slurm {option!r}: expected an sbatch option, such as partition=long or exclusive"]
    if option.startswith("-") and not option.startswith("--") and len(name) > 1:
        return [f"--slurm {option}: a short option is one letter, such as -p=long; a long one has two dashes or none"]
    if name in OURS:
        return [f"--slurm {option}: use {OURS[name]} instead"]
    return [f"--slurm {option}: not allowed: {NEVER[name]}"] if name in NEVER else []
