#!/usr/bin/env bash
# Creates .venv in this checkout, installs mpbridge with the requirements of its checks, and runs them. Extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
make_environment dev
make_te_folders
"$python" -m ruff check .
"$python" -m ruff format --check .
# torch's annotations differ from release to release
if grep -qx "torch==$("$python" -c 'import torch; print(torch.__version__.partition("+")[0])')" scripts/constraints.txt; then
    "$python" -m mypy
else
    echo "types are checked beside the torch of scripts/constraints.txt alone"
fi
"$bin/lint-imports" --no-cache
# several workers, each with as many threads as the machine has cores, would spend their time waiting for each other
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# the suite starts hundreds of processes: each would compile the package again
unset PYTHONDONTWRITEBYTECODE
# a file stays on one worker: its process groups are built once. The order is set by tests/conftest.py. One more worker than two cores, since
# some tests wait. A crash ends the run (xdist would wait forever for what the crashed worker held)
exec "$python" -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 "$@"
