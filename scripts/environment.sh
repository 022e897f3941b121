# Sourced by quickstart.sh and test.sh: creates a virtual environment in the checkout once, with the releases of scripts/constraints.txt, and updates it when
# that file or pyproject.toml changes.

python=.venv/bin/python
bin=.venv/bin

find_python() {
    # the caller's choice, then the tested versions; some distributions ship a Python that cannot create environments
    local candidate
    for candidate in "${PYTHON:-}" python3.12 python3.11 python3 python; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "mpbridge needs Python 3.11 or newer with the venv module; found none (name one with PYTHON=/path/to/python)" >&2
    return 1
}

make_environment() {
    # $1: an extra of pyproject.toml, or nothing
    local extra="${1:-}" mark base
    [ -x "$python" ] || { base="$(find_python)" && "$base" -m venv .venv; }
    mark=".venv/.mpbridge-${extra:-run}"
    if cat pyproject.toml scripts/constraints.txt | cmp -s - "$mark"; then
        return
    fi
    echo "installing into .venv (minutes the first time) ..."
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
    # torch first, and only if it is missing: an existing build, CPU or CUDA, of any release in pyproject's range, is kept
    "$python" -c 'import torch' 2>/dev/null || "$python" -m pip install -q -c scripts/constraints.txt torch
    grep -v '^torch==' scripts/constraints.txt > .venv/constraints.txt
    "$python" -m pip install -q -c .venv/constraints.txt -e ".${extra:+[$extra]}"
    cat pyproject.toml scripts/constraints.txt > "$mark"
}

make_te_folders() {
    # the oldest and the newest Transformer Engine that mpbridge knows, without CUDA parts, in .te/RELEASE: not on any import path; tests/te_cpu finds them
    local version folder
    for version in 2.11.0 2.20.2; do
        folder=".te/${version%.*}"
        [ -d "$folder/transformer_engine" ] && continue
        # a few MB; without a network the tests that need them skip with that reason
        "$python" -m pip install -q --no-deps --target "$folder" "transformer-engine==$version" || { rm -rf "$folder"; echo "no Transformer Engine $version: its tests skip" >&2; }
    done
}
