#!/usr/bin/env bash
# Lint, format, types and tests, on CPUs. Arguments go to pytest; -n sets its workers.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

prepare_venv dev
cd "$ROOT"
export PATH="$VENV/bin:$PATH"
ruff check .
ruff format --check .
mypy
# Two workers keep two cores busy; a file stays with one, so its fixtures are made once.
pytest -n 2 --dist loadfile "$@"
