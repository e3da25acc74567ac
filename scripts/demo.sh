#!/usr/bin/env bash
# Trains the same small GPT three times on real text, on two tensor-parallel processes: uncompressed, with the FP8
# codec of the TACO paper, and with 8-bit integers. Prints the losses and the bytes that were sent. Needs no GPU.
#
#   ./scripts/demo.sh                      about five minutes on two cores, after the setup
#   ./scripts/demo.sh --iterations 240     options are those of scripts/losses.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
.venv/bin/python -W ignore scripts/losses.py --tensor-parallel 2 --codecs none taco int8 --noise-seed 0 --model tiny \
    --iterations 120 --output runs/demo "$@"
cat <<'END'

none   uncompressed.
taco   the FP8 codec of the TACO paper, with outliers stored separately. You type: --taco
int8   for your own runs: it costs less in loss and is as fast. You type: --tp-compression int8

A training this short cannot rank codecs; docs/results/accuracy.md has what each costs. On CPUs compression saves no
time; README.md says where it does. Whole logs, and a report of each run (report/report.md), are in runs/demo.
END
