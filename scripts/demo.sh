#!/usr/bin/env bash
# Trains the same small GPT twice on real text, tensor-parallel, without and with --taco, and compares.
# Options: ./scripts/demo.sh --help. Output: runs/demo/summary.json and a report for each run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python scripts/demo.py "$@"
