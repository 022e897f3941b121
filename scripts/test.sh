#!/usr/bin/env bash
# Makes .venv beside this checkout, installs mpbridge with what its checks need, and runs them. Extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
make_environment dev
"$python" -m ruff check .
"$python" -m mypy
"$bin/lint-imports" --no-cache
exec "$python" -m pytest -q "$@"
