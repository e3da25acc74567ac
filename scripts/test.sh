#!/usr/bin/env bash
# Runs the tests, from a fresh clone too: ./scripts/test.sh [--fast | --all] [pytest arguments]
#   --all   also what is marked thorough: long runs of what shorter tests cover in part.
#   --fast  while editing: settings, codecs and errors, without training and kernels; under 45 s.
# A file's tests stay together, files are spread over processes (tests/conftest.py says how many; -n 0: one).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
# Each run's processes load what the first one has compiled: bytecode is written.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONDONTWRITEBYTECODE=
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
case "${1:-}" in
--fast) set -- tests/unit -m "not slow" "${@:2}" ;;
--all) shift ;;
*) set -- -m "not thorough" "$@" ;;
esac
exec .venv/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder "$@"
