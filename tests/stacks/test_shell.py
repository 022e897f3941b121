"""Launch scripts: the words that are read are those that bash itself hands to the program, and what only running would tell is said."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

from mpbridge.errors import BadValue, DataError
from mpbridge.stacks.importers import read_args, read_file, read_text
from mpbridge.stacks.shell import read_script

BASH = shutil.which("bash")
RECORDER = r"""
command_not_found_handle() { case "$1" in torchrun|python) printf '%s\0' "$@" > "$RECORD";; srun|nohup) shift; "$@";; esac; }
"""
SCRIPTS = {
    "plain": 'A="--bf16 --lr 1"\ntorchrun x.py $A --x "a b"',
    "arrays": "A=(--bf16\n  --fp8-format hybrid # why\n)\nA+=(--lr 1)\ntorchrun x.py ${A[@]} \"${A[@]}\" ${#A[@]} ${A[1]}",
    "quoted-once": 'A=("--a b" "" --c)\ntorchrun x.py "${A[@]}"',
    "split-again": 'A=("--a b" --c)\ntorchrun x.py ${A[@]}',
    "case": 'S=13b\ncase $S in\n 7b|8b) A="--bf16";;\n 1*b) A="--fp16" ;;\n *) A="--none";;\nesac\ntorchrun x.py $A',
    "case-falls-through": "case a in a) A+=--x;& b) A+=y;; c) A+=z;; esac\ntorchrun x.py $A",
    "and-or": '[ 1 -eq 1 ] && A="--bf16" || A="--fp16"\n[ -n "$Z" ] && A+=" --z"\n[[ a == a* && ! b == c ]] && A+=" --y"\ntorchrun x.py $A',
    "elif": 'X=2\nif [ $X -gt 3 ]; then A=1; elif [[ $X -le 2 ]]\nthen A=2; else A=3; fi\ntorchrun x.py --n $A',
    "nested-if": "for i in 1 2; do if [ $i = 2 ]; then if true; then A+=\" --i$i\"; fi; fi; done\ntorchrun x.py $A",
    "defaults": 'torchrun x.py ${A:---bf16} ${B:-} ${C:=7} $C ${C:+--c} "${D-e f}" ${#C}',
    "cut": 'P=a/b/c.tar.gz\ntorchrun x.py ${P##*/} ${P%.*} ${P%%.*} ${P#*/} ${P/b/X} ${P//\\//-} ${P:2:3} ${P^^}',
    "functions": 'add() { A="$A --$1"; local n=$#; A="$A $n"; }\nfunction more { add two b; }\nadd one\nmore\nunused() { add three; }\ntorchrun x.py $A "$@"',
    "own-arguments": "set -- --a 'b c' d\nshift\ntorchrun x.py $# $1 \"$@\" \"$2\"",
    "options-loop": 'set -- --n 4 --fp8\nwhile [[ $# -gt 0 ]]; do case $1 in --n) N=$2; shift 2;; --fp8) F="--fp8-format hybrid"; shift;; *) shift;; esac; done\ntorchrun x.py --n $N $F',
    "arithmetic": "A=3; B=$((A * 2 + 7 / 2 - 1 % 3)); ((A += 4)); torchrun x.py $B $A $(( (A > 3) && 1 ))",
    "substitutions": 'D=$(dirname /a/b/c.sh); torchrun x.py $(echo --bf16 --lr 1) `basename /x/y.z .z` "$D" $(seq 1 3) $(printf %s q)',
    "string-of-commands": 'R="torchrun x.py --bf16 --lr 1"\nsrun bash -c "cd /tmp && $R"',
    "eval": 'A="--bf16"; eval torchrun x.py \\$A "--b"',
    "here-document": 'read -r -d "" A <<EOF\n--bf16 --x $((1+1))\nEOF\nB=$(cat <<\'Q\'\n--no\nQ\n)\ntorchrun x.py $A',
    "here-document-run": "N=4\nbash <<EOF\ntorchrun x.py --n $N --bf16\nEOF",
    "continued": "torchrun x.py \\\n  --a \\\n  --b 2>&1 | cat > /dev/null",
    "environment-of-one-command": "A=1\nA=2 torchrun x.py --a $A",
    "quotes": "torchrun x.py 'a $B' \"c \\\"d\\\" \\$E\" f\\ g $'h\\ti' a\"b c\"d",
    "subshell": "A=1; (A=2; A+=3); { A+=4; }; torchrun x.py $A",
    "keyed-array": 'declare -A M=([s]=--small [l]=--large)\nM[x]=--extra\nK=l\ntorchrun x.py ${M[$K]} ${M[x]}',
    "indirect": 'NAME=OPTS; OPTS="--bf16 --x"; torchrun x.py ${!NAME}',
    "braces": "torchrun x.py --g{1..3} {a,b}c",
    "until-and-break": "i=0; until [ $i -ge 9 ]; do i=$((i+1)); [ $i = 2 ] && continue; A+=\" $i\"; if [ $i = 4 ]; then break; fi; done; torchrun x.py $A",
    "not": "if ! false; then A=--yes; fi; ! true || A+=--no; torchrun x.py $A",
    "comments": "# --fp16\nA='--a#b' # --no\ntorchrun x.py $A # --never",
    "semicolons": 'A="--x"; if [ "$A" = "--x" ]; then A="--y"; fi; torchrun x.py $A; echo done',
    "regex": '[[ gpt-13b =~ ^gpt-([0-9]+)b$ ]] && A=--sized; torchrun x.py $A',
    "exit-status": "false; A=$?; true; torchrun x.py --last $A $?",
    "early-exit": "torchrun x.py --first\nexit 0\ntorchrun x.py --second --third",
}  # fmt: skip


@pytest.mark.skipif(BASH is None, reason="bash is not on this machine")
@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_what_bash_hands_over(name: str, tmp_path: Path) -> None:
    script, record, recorder = tmp_path / "train.sh", tmp_path / "record", tmp_path / "recorder.sh"
    script.write_text(SCRIPTS[name])
    recorder.write_text(RECORDER)
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "basename", "seq", "cat"):
        (tools / tool).symlink_to(shutil.which(tool) or "")
    assert BASH is not None
    environment = {"PATH": str(tools), "BASH_ENV": str(recorder), "RECORD": str(record)}
    subprocess.run([BASH, str(script)], env=environment, cwd=tmp_path, check=False, capture_output=True, timeout=60)
    theirs = record.read_text().split("\0")[:-1]
    assert read_script(script.read_text(), {}, script).words == theirs[theirs.index("x.py") + 1 :]


@pytest.mark.parametrize(
    ("script", "words", "note"),
    [
        ("N=$(nvidia-smi -L)\ntorchrun x.py --n $N --bf16", ["--n", "--bf16"], "$(nvidia-smi -L) is not run"),
        ("torchrun x.py --bf16 `date +%s`", ["--bf16"], "$(date +%s) is not run"),
        ("source conf.sh\ntorchrun x.py --bf16", ["--bf16"], "`source conf.sh` is not read"),
        ('torchrun x.py --bf16 "$@"', ["--bf16"], '"$@" has no values'),
        ("f() { A=--fp16; }\ntorchrun x.py --bf16 $A", ["--bf16"], "the function f is never called"),
        ("if [ -n 1 ]; then\ntorchrun x.py --bf16", ["--bf16"], "the `if` in line 1 is never closed"),
        ('A="--x\ntorchrun x.py --bf16', ["--bf16"], "a quote opened in line 1 is never closed"),
        ("A=(--a --b", ["--a", "--b"], "a parenthesis opened in line 1 is never closed"),
        ("for i in 1 2; do\ntorchrun x.py --bf16", ["--bf16"], "the `for` in line 1 is never closed"),
        ("case a in a) torchrun x.py --bf16", ["--bf16"], "the `case` in line 1 is never closed"),
        ("if nvidia-smi; then A=--bf16; else A=--fp16; fi\ntorchrun x.py $A", ["--fp16"], "`nvidia-smi` is not run: assumed false"),
        ("[ -f a.txt ] && A=--x\ntorchrun x.py --y $A", ["--y"], "`[ -f a.txt ]` is not checked: assumed not to exist"),
        ("grep -q x y && A=--x\ntorchrun x.py $A", ["--x"], "`grep -q x y` is not run: assumed to succeed"),
        ('if [ -z "$1" ]; then exit 1; fi\ntorchrun x.py --bf16', ["--bf16"], "would end the script before it starts a program"),
        ("torchrun a.py --x\ntorchrun b.py --x --y", ["--x", "--y"], "2 commands start a program with options"),
        ("cat > job.sh <<EOF\npython y.py --fp16\nEOF\ntorchrun x.py --bf16", ["--bf16"], "here-document"),
        ("while read -r X; do A=$X; done\ntorchrun x.py --bf16 $A", ["--bf16"], "`read X`"),
        ("fi\ntorchrun x.py --bf16", ["--bf16"], "`fi` in line 1 closes nothing"),
    ],
)  # fmt: skip
def test_what_only_running_would_tell_is_said(script: str, words: list[str], note: str) -> None:
    found = read_script(script, {})
    assert found.words == words
    assert any(note in line for line in found.notes), found.notes


def test_a_sourced_file_beside_the_script_is_read_and_one_elsewhere_is_not(tmp_path: Path) -> None:
    (tmp_path / "job" / "conf").mkdir(parents=True)
    (tmp_path / "job" / "conf" / "8b.sh").write_text('MODEL="--bf16 --num-layers $LAYERS"')
    (tmp_path / "secret.sh").write_text("MODEL=--fp16")
    script = tmp_path / "job" / "run" / "train.sh"
    script.parent.mkdir()
    script.write_text('LAYERS=4\nHERE=$(dirname "$(readlink -f "$0")")\n. "$HERE/../conf/$1.sh"\ntorchrun x.py $MODEL')
    assert read_script(script.read_text(), {"1": "8b"}, script).words == ["--bf16", "--num-layers", "4"]
    script.write_text("source ../../secret.sh\ntorchrun x.py --bf16 $MODEL")
    found = read_script(script.read_text(), {}, script)
    assert found.words == ["--bf16"]
    assert any("is not read" in line for line in found.notes)


def test_an_outer_variable_is_the_environment_and_what_the_script_sets_wins() -> None:
    assert read_script("torchrun x.py --n ${N:-1}", {"N": "3"}).words == ["--n", "3"]
    found = read_script("N=1\ntorchrun x.py --n $N", {"N": "3", "M": "1"})
    assert found.words == ["--n", "1"]
    assert any("--env N=3 has no effect" in line for line in found.notes)
    assert any("--env M: the script does not use it" in line for line in found.notes)
    assert any("--env N: the script" in line for line in read_script("torchrun x.py --n $NN", {"N": "3"}).notes)


def test_a_variable_that_a_sourced_file_uses_is_used(tmp_path: Path) -> None:
    (tmp_path / "common.sh").write_text('A="--fp8-format $F"')
    script = tmp_path / "run.sh"
    script.write_text("source ./common.sh\ntorchrun pretrain_gpt.py --bf16 $A")
    found = read_script(script.read_text(), {"F": "hybrid"}, script)
    assert found.words == ["--bf16", "--fp8-format", "hybrid"]
    assert not any("--env" in line for line in found.notes)


@pytest.mark.parametrize(
    "script",
    [
        "A=xx\nfor i in {1..100}; do A=$A$A; done",
        "f() { f; }\nf",
        "(" * 500,
        "$(" * 500,
        "while true; do while true; do A+=x; done; done",
        "\0",
    ],
)
def test_a_script_without_an_end_is_an_error_or_an_answer(script: str) -> None:
    with contextlib.suppress(BadValue):  # any other error is the failure
        assert isinstance(read_script(script, {}).words, list)


def test_nothing_of_a_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = "X=$(touch a) `touch b`; touch c; eval 'touch d'; bash -c 'touch e'; : > f; if touch g; then :; fi; torchrun x.py --bf16 $(touch h)"
    assert read_script(script, {}).words == ["--bf16"]
    assert list(tmp_path.iterdir()) == []


def test_arguments_take_variables_too() -> None:
    assert (
        read_args("--bf16 $MORE --lr 1", env={"MORE": "--grad-reduce-in-bf16"}).fields["grad_reduce_in_fp32"] is False
    )
    assert any("$MORE has no value" in line for line in read_args("--bf16 $MORE").assumed)
    assert "--env MOER: the text of --args does not use it" in read_args("--bf16 $MORE", env={"MOER": "--fp16"}).assumed
    with pytest.raises(BadValue, match=r"never closed$"):  # not that it is read as if it were
        read_args("--bf16 'x")
    with pytest.raises(BadValue, match="one command"):
        read_args("--bf16; rm x")


def test_the_verb_takes_arguments_as_people_type_them(capsys: pytest.CaptureFixture[str]) -> None:
    from mpbridge.cli.main import main

    assert main(["import", "--args", "--bf16"]) == 0
    assert "bf16_mixed" in capsys.readouterr().out
    assert main(["import", "--env", "X=--fp16", "--args", "$X"]) == 0
    assert "fp16_mixed" in capsys.readouterr().out


def test_a_script_read_from_its_file_finds_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("A='--bf16 --fp8-format hybrid'")
    (tmp_path / "b.sh").write_text("source `pwd`/a.sh\npython pretrain_gpt.py $A")
    assert read_file(tmp_path / "b.sh").fields["fp8"] == "hybrid"
    with pytest.raises(DataError, match=r"it has no Megatron-LM option.*no such file next to the script"):
        read_text((tmp_path / "b.sh").read_text(), name="b.sh")
