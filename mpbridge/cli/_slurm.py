"""A Slurm script for one run on many nodes: torchrun once per node, a notice before the time limit, and a requeue."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpbridge import __version__
from mpbridge.config.training import ANNOUNCED

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
    lines = ["#!/bin/bash", f"# written by mpbridge {__version__}"]
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
