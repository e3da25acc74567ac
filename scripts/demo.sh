#!/usr/bin/env bash
# Trains the same small GPT twice on real text, tensor-parallel, without and with --taco, and compares. Options are
# those of scripts/losses.py (--iterations 240, --tensor-parallel 4). A report for each run is in runs/demo.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
exec .venv/bin/python scripts/losses.py --tensor-parallel 2 --codecs none taco --noise-seed 0 --model tiny \
    --iterations 120 --output runs/demo "$@"
