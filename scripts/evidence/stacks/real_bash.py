"""Compares mpbridge's reading of launch scripts with what bash itself passes to their programs.

    python scripts/evidence/stacks/real_bash.py CHECKOUT [FOLDER ...]      (FOLDER: in the checkout, default: examples)

Each script is actually run by bash on a copy of its folder, with an empty environment and a PATH on which only the text tools are real (dirname,
basename, readlink, realpath, seq): every other program is a recorder of its arguments. Scripts that name a program by an absolute path, or
write to one, are skipped. Existing files cannot be overwritten there (noclobber), and if the machine allows it there is no network.
Exit code 0 if the words that mpbridge reads are those that bash passes, for every script that starts a program.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
REAL = ("dirname", "basename", "readlink", "realpath", "seq", "bash", "sh")
RECORDER = r"""
unset RANDOM SECONDS HOSTNAME
set -o noclobber
command_not_found_handle() {
    local at
    for ((at = 1; at <= $#; at++)); do
        if [[ ${!at} == */bash || ${!at} == bash || ${!at} == sh ]]; then
            local next=$((at + 1)) text=$((at + 2))
            if [[ ${!next} == -c || ${!next} == -lc ]]; then bash -c "${!text}"; return 0; fi
        fi
    done
    printf '%s\0' "$@" >> "$RECORD"
    printf '\n\0' >> "$RECORD"
}
left() {
    local name value
    for name in $(compgen -v); do
        if [[ $name != BASH* && $name != [A-Z_]*ARGV ]]; then
            local -n held=$name
            for value in "${held[@]}"; do printf '%s\0' "$value" >> "$VALUES"; done
        fi
    done
}
if [[ -n $VALUES ]]; then
    trap left EXIT
fi
"""
"""Records every missing program. With VALUES set, also the final values of the script's variables, for files of options that start no program."""
NOT_ALLOWED = re.compile(
    r">\s*[\"']?/(?!dev/(?:null|stdout|stderr))|(?:^|[;&|(]|\bexec)\s*/(?:usr|bin|sbin|opt|root|home)\S*|/dev/(?:tcp|udp)",
    re.MULTILINE,
)
SECONDS = 20


def runs(script: Path, env: dict[str, str], work: Path, *, fragment: bool = False) -> list[list[str]] | str:
    """Argument vectors of the programs that a script starts, or why it was not run. script: in a copy that may be written to."""
    text = re.sub(r"(?m)(^|\s)#.*$", "", script.read_text(encoding="utf-8", errors="replace"))
    if NOT_ALLOWED.search(text):
        return "names a program or a file by an absolute path"
    # scripts for the checkout's root check that it exists; `<path to image>` in others reads a file of that name
    for name in ("pretrain_gpt.py", "pretrain_hybrid.py", "path", "some"):
        (script.parent / name).touch()
    record, values = work / "record", work / "values"
    for old in (record, values):
        old.unlink(missing_ok=True)
    arguments = [env[str(i)] for i in range(1, 20) if str(i) in env]
    command = [*_alone(), "bash", "--noprofile", "--norc", str(script), *arguments]
    named = {name: value for name, value in env.items() if not name.isdigit()}
    named |= {"VALUES": str(values)} if fragment else {}
    try:
        subprocess.run(
            command,
            cwd=script.parent,
            env=named | _surroundings(work, record),
            capture_output=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"runs for longer than {SECONDS} s"
    if fragment:
        return [[word for value in _pieces(values) if "--" in value for word in value.split()]]
    return _vectors(_pieces(record))


def _surroundings(work: Path, record: Path) -> dict[str, str]:
    """The environment of a script: the real tools and the recorder, written to `work`."""
    tools = work / "bin"
    tools.mkdir(exist_ok=True)
    for name in REAL:
        real = shutil.which(name)
        if real and not (tools / name).exists():
            (tools / name).symlink_to(real)
    recorder = work / "recorder.sh"
    recorder.write_text(RECORDER)
    return {"PATH": str(tools), "BASH_ENV": str(recorder), "RECORD": str(record), "HOME": str(work)}


def _pieces(path: Path) -> list[str]:
    """The recorder's output, without the NUL after each item; empty if there is no file."""
    return path.read_bytes().decode("utf-8", "replace").split("\0")[:-1] if path.exists() else []


def _vectors(words: list[str]) -> list[list[str]]:
    """Splits words, with a line end after each program's, into one list per program that has any."""
    found: list[list[str]] = [[]]
    for word in words:
        if word == "\n":
            found.append([])
        else:
            found[-1].append(word)
    return [one for one in found if one]


def _alone() -> list[str]:
    """The prefix that runs a command without network, if this machine allows it."""
    found = shutil.which("unshare")
    if found and not subprocess.run([found, "-rn", "true"], capture_output=True).returncode:
        return [found, "-rn"]
    return []


def program(vectors: list[list[str]]) -> list[str] | None:
    """The words after the Python program in the vector with the most options; the last one if several. None if no vector starts one."""
    best: list[str] | None = None
    for words in vectors:
        at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
        at = next((i + 1 for i, word in enumerate(words[:-1]) if word == "-m" and i), None) if at is None else at
        if at is not None and (best is None or _options(words[at + 1 :]) >= _options(best)):
            best = words[at + 1 :]
    return best


def _options(words: list[str]) -> int:
    return sum(word.startswith("--") for word in words)


def given(script: Path, env: dict[str, str]) -> dict[str, str]:
    """`env` with a value for every variable that a script takes from outside: without theirs, most scripts end at once."""
    from mpbridge.interop.stacks.launch_script import read_script

    first = read_script(script.read_text(encoding="utf-8", errors="replace"), env, script)
    named = (note for note in first.notes if "no value" in note)
    names = {name for note in named for name in re.findall(r"\$(\w+)", note)} - env.keys() - NOT_GIVEN
    env = {**dict.fromkeys(sorted(names), "1"), **env}
    last = max((int(name) for name in env if name.isdigit()), default=0)
    return {**{str(i): "1" for i in range(1, last + 1)}, **env}


def compared(script: Path, env: dict[str, str], work: Path) -> tuple[str, list[str], list[str]]:
    """('alike' | 'differs' | why not, bash's words, ours)."""
    from mpbridge.interop.stacks.launch_script import read_script

    text = script.read_text(encoding="utf-8", errors="replace")
    env = given(script, env)
    bash = shutil.which("bash") or "bash"
    if subprocess.run([bash, "-n", str(script)], capture_output=True).returncode:
        return "bash refuses its syntax", [], []
    vectors = runs(script, env, work)
    if isinstance(vectors, str):
        return vectors, [], []
    found = read_script(text, env, script)
    theirs, ours = program(vectors), found.words
    said = any(re.search("not (decided|followed|read)", note) for note in found.notes)
    if theirs is not None:
        if _comparable(ours) == _comparable(theirs):
            return "alike", theirs, ours
        return ("less than bash hands over, which is said" if said else "differs"), theirs, ours
    made = runs(script, env, work, fragment=True)
    options = (
        sorted(set(_comparable([word for word in made[0] if word.startswith("--")]))) if isinstance(made, list) else []
    )
    if not options:
        return "neither starts a program nor sets options", [], ours
    mine = sorted(set(_comparable([word for one in ours for word in one.split() if word.startswith("--")])))
    if mine != options and said:
        return "less than bash sets, which is said", made[0], ours
    return ("options alike" if mine == options else "differs"), made[0] if isinstance(made, list) else [], ours


MORE = {
    "gptoss": {"1": "--checkpoint-path", "2": ".", "3": "--tensorboard-logs-path", "4": "."},
    "inference": {"1": "--hf-token", "2": "x", "3": "--hf-home", "4": "y", "5": "--checkpoint", "6": "z"},
    "modelopt": {"1": "Qwen/Qwen3-8B", "MLM_MODEL_CKPT": "ckpt", "TP": "2"},
}
"""Folder -> arguments and variables for its scripts."""
NOT_GIVEN = frozenset(
    {"RANDOM", "SECONDS", "HOSTNAME", "LAUNCH_SCRIPT", "SANDBOX_ENV_SETUP", "SANDBOX_ROOT", "MLM_ENV_SETUP"}
)


def _comparable(words: list[str]) -> list[str]:
    """Words without process numbers: `$$` differs in every run."""
    return [re.sub(r"\d{3,}(?=\D*$)", "", word) if "/" in word else word for word in words]


def main() -> int:
    """The command line of this script."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("checkout", type=Path)
    arguments.add_argument("folders", nargs="*", default=["examples"])
    arguments.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    args = arguments.parse_args()
    env = dict(pair.split("=", 1) for pair in args.env)
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as place:
        work = Path(place).resolve()
        for folder in args.folders:
            shutil.copytree(args.checkout / folder, work / "copy" / folder, symlinks=True)
        for script in sorted((work / "copy").rglob("*.sh")):
            verdict, theirs, ours = compared(script, env | MORE.get(script.parent.name, {}), work)
            counts[verdict] = counts.get(verdict, 0) + 1
            if verdict == "differs":
                print(
                    f"{script.relative_to(work / 'copy')}: bash {[w for w in theirs if w not in ours][:8]}, here {[w for w in ours if w not in theirs][:8]}"
                )
            elif not verdict.endswith("alike"):
                print(f"{script.relative_to(work / 'copy')}: {verdict}")
    alike = counts.pop("alike", 0) + counts.pop("options alike", 0)
    differ = counts.pop("differs", 0)
    others = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    print(
        f"scripts that start a program or hold options: {alike + differ}, read as bash passes them: {alike}; others: {others}"
    )
    return 0 if alike and not differ else 1


if __name__ == "__main__":
    raise SystemExit(main())
