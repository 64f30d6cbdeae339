#!/usr/bin/env bash
# Trains a small GPT-MoE on 4 CPU ranks under alltoall and under moonep, and compares them.
# Writes demo-out/compare.json and demo-out/compare.png. Options go to compare_dispatchers.py.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

prepare_venv
cd "$ROOT"
# On CPUs wherever it runs, so that every machine shows the same.
CUDA_VISIBLE_DEVICES="" "$VENV/bin/python" scripts/compare_dispatchers.py --ranks 4 \
  --json demo-out/compare.json --png demo-out/compare.png "$@"
echo "Wrote demo-out/compare.json and demo-out/compare.png"
