"""`mpbridge launch ... -- train ...`: prints or submits a Slurm script for a run on many nodes: torchrun once per node, a notice before the time limit, and a requeue."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpbridge.cli._schedule import lost_states, stage_names
from mpbridge.cli.options import arg, resolved, too_small, whole
from mpbridge.cli.text import print_line, print_whole
from mpbridge.common.errors import BadValue, Contradiction, MpbridgeError, Refused
from mpbridge.common.machines import machine
from mpbridge.common.report.console import warn
from mpbridge.common.shipped import VERSION
from mpbridge.planning.capability import ASSUMED
from mpbridge.planning.rules.table import broken
from mpbridge.settings.container import Run
from mpbridge.settings.training import ANNOUNCED
from mpbridge.training.admission import Admission

SUMMARY = "print or submit a Slurm script for a run on many nodes that resumes automatically after each time limit"
USAGE = "as in: mpbridge launch --nodes 2 --gpus-per-node 8 -- train --config llama3_8b checkpoint.save=DIR"
ARGUMENTS = (
    arg("--nodes N", "nodes", whole, least=1, required=True),
    arg("--gpus-per-node M", "GPUs per node, with one process each", whole, least=1, required=True),
    arg("--cpu", "no GPUs: M processes per node"),
    arg("--submit", "submit the script with sbatch (default: print it)"),
    arg("--time D-HH:MM:SS", "the time limit (default: the partition's)"),
    arg("--notice S", "seconds before the limit for the run to finish its step, save and requeue (default: 120)", whole, least=1, default=120),
    arg("--retries K", "how often to requeue a failed run (default: 0)", whole, least=0, default=0),
    arg("--name NAME", "the job's name", default="mpbridge"),
    arg("--image IMAGE", "a container image for Slurm's pyxis plugin: [REGISTRY#]NAME[:TAG], or a squashfs file"),
    arg("--mount FROM:TO", "a folder to mount in the container", action="append", default=[]),
    arg("--slurm OPTION", "another sbatch option, such as partition=long", action="append", default=[]),
    arg("--python FILE", "the Python interpreter on the nodes (default: this one; python in an image)"),
    arg("command -- train ...", "what to run: train with its arguments, or a script", nargs=argparse.REMAINDER),
)  # fmt: skip

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


def run(args: argparse.Namespace) -> int:
    """Checks the run for that number of processes, and prints or submits the script."""
    faults = job_faults(args)
    if faults:
        raise Contradiction(faults, subject="the job cannot be launched")
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        raise BadValue(f"the command to run is missing: {USAGE}")
    if trains := words[0] == "train":
        words = ["-m", "mpbridge", "train", *_resumable(words[1:], args)]
    elif not words[0].endswith(".py"):
        raise BadValue(f"{words[0]!r} cannot be launched, expected train or a .py file: {USAGE}")
    elif not Path(words[0]).is_file() and not (args.image and Path(words[0]).is_absolute()):
        raise BadValue(f"{words[0]}: no such file here, expected train or a .py file: {USAGE}")
    lines = [*_header(args), "", *_body(args, words, repeats=trains)]
    _submit("\n".join([*lines, ""])) if args.submit else print_whole("\n".join(lines))
    return 0


def _resumable(words: list[str], args: argparse.Namespace) -> list[str]:
    """train's arguments plus the setting that makes the same command resume. Raises Contradiction, BadValue or Refused before anything is queued."""
    from mpbridge.cli.main import parser_of, with_way

    given: Any = parser_of("train").parse_intermixed_args(with_way(words))
    if given.reset_optimizer:
        given.overrides = [*given.overrides, "checkpoint.reset_optimizer=true"]
    # an image's contents are not known here
    admission = Admission(here=not args.image)
    made = resolved(
        given,
        training=True,
        world_size=args.nodes * args.gpus_per_node,
        also=lambda sections: [*_requeue_faults(sections["checkpoint"]), *admission(sections)],
    )
    _refuse_broken(made, gpus=not args.cpu)
    for note in (*admission.notes, *admission.trackers):
        warn(f"note: {note}")
    return words if made.checkpoint["load"] else [*words, f"checkpoint.load={made.checkpoint['save']}"]


def _requeue_faults(section: Mapping[str, Any]) -> list[str]:
    """Checkpoint settings that would not survive a requeue, which repeats the command."""
    save, load = section["save"], section["load"]
    if not save:
        return ["checkpoint.save is not set: without checkpoints the run starts over after every time limit"]
    cure = f"drop it; to start from the weights of another checkpoint: checkpoint.pretrained_checkpoint={load or 'DIR'}"
    again = f"checkpoint.load={load} is not checkpoint.save={save}: after its time limit the run would start from there again: {cure}"
    reset = f"checkpoint.reset_optimizer (--reset-optimizer) would drop the optimizer's states after every time limit: {cure}"
    elsewhere = bool(load) and Path(load).resolve() != Path(save).resolve()
    return [again] * elsewhere + [reset] * bool(section["reset_optimizer"])


def _refuse_broken(made: Run, *, gpus: bool) -> None:
    """Raises Refused with the rules that the run breaks, in any of its stages, on any node, since the nodes are not known here."""
    versions = ASSUMED if gpus else made.facts.versions
    nodes = [machine(name) for name in (("a100", "h100", "b200") if gpus else ("cpu",))]
    runs = made.by_stage()
    found = list(map(str, lost_states(runs)))
    for name, run in zip(stage_names(made), runs, strict=True):
        there = [dataclasses.replace(run.facts, machine=node, versions=versions, environment={}) for node in nodes]
        errors = [{v.rule: v for v in broken(run.policy, facts) if v.severity == "error"} for facts in there]
        everywhere = (v for rule, v in errors[0].items() if all(rule in other for other in errors))
        found += [f"{name}: {violation}" if name else str(violation) for violation in everywhere]
    if found:
        raise Refused("\n".join(found))


def _header(job: argparse.Namespace) -> list[str]:
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        **({"gpus-per-node": job.gpus_per_node} if not job.cpu else {}),
        **({"time": job.time} if job.time else {}),
        "signal": f"B:{NOTICE}@{job.notice}",
        "open-mode": "append",
        "output": "slurm-%j.out",
    }
    lines = ["#!/bin/bash", f"# written by mpbridge {VERSION}"]
    lines += [f"#SBATCH --{name}={value}" for name, value in options.items()]
    return [*lines, "#SBATCH --requeue", *(f"#SBATCH {_spelled(option)}" for option in job.slurm)]


def _spelled(option: str) -> str:
    """An option as sbatch reads it: one letter is a short option, with a separate value."""
    name, _, value = option.lstrip("-").partition("=")
    return f"-{name} {value}".rstrip() if len(name) == 1 else f"--{option.lstrip('-')}"


def _body(job: argparse.Namespace, command: Sequence[str], *, repeats: bool) -> list[str]:
    """command: what torchrun runs: a script, or '-m' and a module, with arguments. repeats: whether it takes the notice any number of times."""
    python = job.python or ("python" if job.image else sys.executable)
    run = [python, "-m", "torch.distributed.run", f"--nnodes={job.nodes}", f"--nproc-per-node={job.gpus_per_node}"]
    meet = (
        '--rdzv-backend=c10d --rdzv-endpoint="$HEAD" --rdzv-id="$MEETING" --rdzv-conf="is_host=$((SLURM_NODEID == 0))"'
    )
    node = f'trap "" {NOTICE}; exec {shlex.join(run)} {meet} {shlex.join(command)}'
    image = f" --container-image={shlex.quote(job.image)}" if job.image else ""
    mounts = ",".join(['"$PWD"', *map(shlex.quote, job.mount)])
    image += f' --container-mounts={mounts} --container-workdir="$PWD"' if job.image else ""
    again = [f"failures <= {job.retries}"] if job.retries else []
    # the handler of somebody's script may save whenever it is called, so it is called once
    passing_on = [f'pass_on() {{ kill -{NOTICE} "$step"; }}'] if not repeats else [
        "# again and again: ranks that are still starting hear it as soon as they can",
        f'pass_on() {{ while kill -{NOTICE} "$step" 2>/dev/null; do sleep {REPEATED}; done & }}',
    ]  # fmt: skip
    return [
        "# a notice may come at any moment: before the run it keeps it from starting, later srun passes it on to every process of every node",
        "noticed=0 step= code=1",
        *passing_on,
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


def job_faults(args: argparse.Namespace) -> list[str]:
    """Everything that is wrong with the options of `launch`."""
    faults = too_small(args, ARGUMENTS)
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


def _submit(text: str) -> None:
    if shutil.which("sbatch") is None:
        raise MpbridgeError(
            "sbatch is not installed here: print the script (without --submit) and submit it on a machine with Slurm"
        )
    done = subprocess.run(["sbatch"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MpbridgeError(f"sbatch refused the script: {' '.join(done.stderr.split())}")
    print_line(done.stdout.removesuffix("\n"))
