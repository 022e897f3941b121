#!/usr/bin/env bash
# Makes .venv beside this checkout, installs mpbridge with what its checks need, and runs them. Extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
make_environment dev
make_te_folders
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
"$bin/lint-imports" --no-cache
# several workers, each with a pool of threads as wide as the machine, would spend their time waiting for one another
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# a file stays on one worker: its worlds of processes are built once; in the order that tests/conftest.py gives; one more worker than two cores, since
# some tests wait; a crash ends the run (xdist would wait for ever for what the crashed one held)
exec "$python" -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 "$@"
