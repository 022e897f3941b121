#!/usr/bin/env bash
# Builds the documentation into site/, strictly: a broken link or a page outside of the navigation is an error. Needs no network once installed.
# Extra arguments go to mkdocs: bash scripts/docs.sh --clean
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
make_environment docs
"$python" scripts/generate/tables.py --check
export NO_MKDOCS_2_WARNING=1  # a note about the tool itself, not about these pages
"$python" -m mkdocs build --strict --quiet "$@"
echo "site/index.html"
