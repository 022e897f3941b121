"""A Slurm job for one run on many nodes: what may be asked for, and its script: torchrun once per node, a notice before the time limit, and a requeue."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpbridge.common.shipped import VERSION
from mpbridge.settings.training import ANNOUNCED

NOTICE = "USR1"
"""The signal before the time limit; mpbridge finishes its step, saves and exits."""


REPEATED = 5
"""Seconds between two notices to a run: little of --notice, and no load for srun."""


_COUNTED = (
    "# failures are counted separately: Slurm's restart count includes restarts after a notice or a lost node",
    'FAILURES=".mpbridge-failures-$SLURM_JOB_ID" failures=0',
    'if ((code != 0 && !noticed)); then echo >>"$FAILURES"; failures=$(wc -l <"$FAILURES"); fi',
    '((code != 0)) || rm -f "$FAILURES"',
    "",
)
"""Script lines that count failures, in a file in the job's working folder."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job to request from Slurm."""

    nodes: int
    per_node: int
    """Processes per node, one per GPU."""
    command: Sequence[str]
    """What torchrun runs: a script, or '-m' and a module, with arguments."""
    repeats: bool = False
    """Whether the command takes the notice any number of times: it is repeated then, for ranks that were not listening yet."""
    python: str
    name: str = "mpbridge"
    gpus: bool = True
    time: str | None = None
    notice: int = 120
    """Seconds between the notice and the time limit: a step and a checkpoint."""
    retries: int = 0
    """How often a failed run is requeued."""
    image: str | None = None
    """A container image for Slurm's pyxis plugin."""
    mounts: Sequence[str] = ()
    options: Sequence[str] = field(default=())
    """Further #SBATCH options, such as 'partition=long'."""


def script(job: Job) -> str:
    """The batch script."""
    return "\n".join([*_header(job), "", *_body(job)]) + "\n"


def _header(job: Job) -> list[str]:
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        **({"gpus-per-node": job.per_node} if job.gpus else {}),
        **({"time": job.time} if job.time else {}),
        "signal": f"B:{NOTICE}@{job.notice}",
        "open-mode": "append",
        "output": "slurm-%j.out",
    }
    lines = ["#!/bin/bash", f"# written by mpbridge {VERSION}"]
    lines += [f"#SBATCH --{name}={value}" for name, value in options.items()]
    return [*lines, "#SBATCH --requeue", *(f"#SBATCH {_spelled(option)}" for option in job.options)]


def _spelled(option: str) -> str:
    """An option as sbatch reads it: one letter is a short option, with a separate value."""
    name, _, value = option.lstrip("-").partition("=")
    return f"-{name} {value}".rstrip() if len(name) == 1 else f"--{option.lstrip('-')}"


def _body(job: Job) -> list[str]:
    run = [job.python, "-m", "torch.distributed.run", f"--nnodes={job.nodes}", f"--nproc-per-node={job.per_node}"]
    meet = (
        '--rdzv-backend=c10d --rdzv-endpoint="$HEAD" --rdzv-id="$MEETING" --rdzv-conf="is_host=$((SLURM_NODEID == 0))"'
    )
    node = f'trap "" {NOTICE}; exec {shlex.join(run)} {meet} {shlex.join(job.command)}'
    image = f" --container-image={shlex.quote(job.image)}" if job.image else ""
    mounts = ",".join(['"$PWD"', *map(shlex.quote, job.mounts)])
    image += f' --container-mounts={mounts} --container-workdir="$PWD"' if job.image else ""
    again = [f"failures <= {job.retries}"] if job.retries else []
    return [
        "# a notice may come at any moment: before the run it keeps it from starting, later srun passes it on to every process of every node",
        "noticed=0 step= code=1",
        *_passing_on(job),
        f"trap 'noticed=1; [ -z \"$step\" ] || pass_on' {NOTICE}",
        "",
        "# the nodes meet on the first one; a restart must not meet leftovers of the previous run",
        'export HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 10000))"',
        'export MEETING="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        f"export {ANNOUNCED}={NOTICE}  # torchrun ignores it, the ranks handle it",
        "",
        "if ((!noticed)); then",
        "    # after a node's torchrun exits, the others get that many seconds: rank 0 may be sealing a checkpoint",
        f"    srun --kill-on-bad-exit=0 --wait={job.notice}{image} bash -c {shlex.quote(node)} &",
        "    step=$!",
        "    ((!noticed)) || pass_on  # it came between these two lines",
        '    wait "$step"; code=$?',
        '    while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done  # a trap interrupts wait',
        "fi",
        "",
        *(_COUNTED if job.retries else []),
        "# 0: the run is complete. Otherwise requeue, if the notice ended it"
        + (f" or it failed (at most {job.retries} times):" if job.retries else ":"),
        "# the same command resumes from the latest checkpoint",
        f"if ((code != 0 && ({' || '.join(['noticed', *again])}))); then",
        '    echo "requeued after exit code $code"',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "    sleep 60  # until Slurm ends this script",
        "fi",
        'exit "$code"',
    ]


def _passing_on(job: Job) -> list[str]:
    """The function that passes the notice on; the handler of somebody's script may save whenever it is called, so it is called once."""
    if not job.repeats:
        return [f'pass_on() {{ kill -{NOTICE} "$step"; }}']
    return [
        "# again and again: ranks that are still starting hear it as soon as they can",
        f'pass_on() {{ while kill -{NOTICE} "$step" 2>/dev/null; do sleep {REPEATED}; done & }}',
    ]


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
