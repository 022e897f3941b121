"""`mpbridge launch ... -- train ...`: prints or submits a Slurm script for a run on many nodes."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpbridge.cli._slurm import Job, job_faults, script
from mpbridge.cli.options import arg, resolved, whole
from mpbridge.cli.text import complain, print_line, print_whole, record
from mpbridge.common.errors import BadValue, Contradiction, MpbridgeError, Refused
from mpbridge.common.machines import machine
from mpbridge.planning.hardware.capability import ASSUMED
from mpbridge.planning.rules.base import Violation
from mpbridge.planning.rules.table import broken
from mpbridge.training.admission import Admission

if TYPE_CHECKING:
    from mpbridge.settings.container import Run

SUMMARY = "print or submit a Slurm script for a run on many nodes that resumes automatically after each time limit"
USAGE = "as in: mpbridge launch --nodes 2 --gpus-per-node 8 -- train --config llama3_8b checkpoint.save=DIR"
ARGUMENTS = (
    arg("--nodes N", "nodes", whole, required=True),
    arg("--gpus-per-node M", "GPUs per node, with one process each", whole, required=True),
    arg("--cpu", "no GPUs: M processes per node"),
    arg("--submit", "submit the script with sbatch (default: print it)"),
    arg("--time D-HH:MM:SS", "the time limit (default: the partition's)"),
    arg("--notice S", "seconds before the limit for the run to finish its step, save and requeue (default: 120)", whole, default=120),
    arg("--retries K", "how often to requeue a failed run (default: 0)", whole, default=0),
    arg("--name NAME", "the job's name", default="mpbridge"),
    arg("--image IMAGE", "a container image for Slurm's pyxis plugin: [REGISTRY#]NAME[:TAG], or a squashfs file"),
    arg("--mount FROM:TO", "a folder to mount in the container", action="append", default=[]),
    arg("--slurm OPTION", "another sbatch option, such as partition=long", action="append", default=[]),
    arg("--python FILE", "the Python interpreter on the nodes (default: this one; python in an image)"),
    arg("command -- train ...", "what to run: train with its arguments, or a script", nargs=argparse.REMAINDER),
)  # fmt: skip


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
    python = args.python or ("python" if args.image else sys.executable)
    asked = record(args, "nodes", "name", "time", "notice", "retries", "image")
    made = {"per_node": args.gpus_per_node, "gpus": not args.cpu, "mounts": args.mount, "options": args.slurm}
    job = Job(command=words, repeats=trains, python=python, **asked, **made)
    _submit(script(job)) if args.submit else print_whole(script(job).removesuffix("\n"))
    return 0


def _resumable(words: list[str], args: argparse.Namespace) -> list[str]:
    """train's arguments plus the setting that makes the same command resume. Raises Contradiction, BadValue or Refused before anything is queued."""
    from mpbridge.cli.main import parser_of, with_way

    given: Any = parser_of("train", "mpbridge.cli.train").parse_intermixed_args(with_way(words))
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
        complain(f"note: {note}")
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
    """Raises Refused with the rules that the run breaks on any node, since the nodes are not known here."""
    machines = [machine(name) for name in (("a100", "h100", "b200") if gpus else ("cpu",))]
    errors: list[dict[str, Violation]] = []
    for one in machines:
        versions = ASSUMED if gpus else made.facts.versions
        facts = dataclasses.replace(made.facts, machine=one, versions=versions, environment={})
        errors.append({v.rule: v for v in broken(made.policy, facts) if v.severity == "error"})
    everywhere = [v for rule, v in errors[0].items() if all(rule in other for other in errors)]
    if everywhere:
        raise Refused("\n".join(map(str, everywhere)))


def _submit(text: str) -> None:
    if shutil.which("sbatch") is None:
        raise MpbridgeError(
            "sbatch is not installed here: print the script (without --submit) and submit it on a machine with Slurm"
        )
    done = subprocess.run(["sbatch"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MpbridgeError(f"sbatch refused the script: {' '.join(done.stderr.split())}")
    print_line(done.stdout.removesuffix("\n"))
