#!/usr/bin/env bash
# Lint, format, types and tests, on CPUs. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

prepare_venv dev
cd "$ROOT"
export PATH="$VENV/bin:$PATH"
ruff check .
ruff format --check .
mypy
pytest "$@"
