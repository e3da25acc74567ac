#!/usr/bin/env bash
# Makes .venv with everything this project needs. A second run takes seconds: it compares a stamp.
# PYTHON=/path/to/python3.12 picks the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fits() { # is $1 a Python that megatron-core ships wheels for?
    "$1" -c 'import sys; raise SystemExit(not ((3, 12) <= sys.version_info[:2] <= (3, 13)))' 2>/dev/null
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        fits "$PYTHON" && { echo "$PYTHON"; return; }
        echo "error: PYTHON=$PYTHON is not a Python 3.12 or 3.13; point it at one, or unset it" >&2
        return 1
    fi
    for candidate in python3.12 python3.13 python3 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13*/bin/python; do
        # A pyenv shim answers to the name and then refuses to run: fits() starts it for real.
        if command -v "$candidate" >/dev/null 2>&1 && fits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    echo "error: no Python 3.12 or 3.13 found; install one (apt-get install python3.12-venv, or" \
        "pyenv install 3.12) or set PYTHON=/path/to/python3.12" >&2
    return 1
}

stamp=.venv/.megatron-taco-setup
wanted=$(cat setup.py pyproject.toml constraints.txt megatron/compression/versions.py scripts/setup.sh | sha256sum | cut -d' ' -f1)
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    echo "setup: .venv is up to date"
    exit 0
fi

python=$(find_python)
if [ -x .venv/bin/python ] && ! fits .venv/bin/python; then
    echo "error: .venv holds another Python; remove it (rm -r .venv) and run scripts/setup.sh again" >&2
    exit 1
fi
if [ ! -x .venv/bin/python ]; then
    echo "setup: making .venv with $("$python" --version) ($python)"
    "$python" -m venv .venv
fi
echo "setup: installing (torch's CUDA build is about 5 GB on disk; a few minutes)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
.venv/bin/python -W ignore -c 'import torch, triton, megatron.core, megatron.compression, taco_kernels'
echo "$wanted" >"$stamp"
echo "setup: done"
