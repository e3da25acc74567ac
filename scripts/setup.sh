#!/usr/bin/env bash
# Makes .venv with everything this project needs: ./scripts/setup.sh [--with-transformer-engine]
#   --with-transformer-engine  Transformer Engine too, whose torch part is compiled here: about 25 minutes of CPU
#                              time; needs a C++ compiler, no GPU and no nvcc. MAX_JOBS=N limits its processes.
# A second run takes seconds: it compares a stamp. PYTHON=/path/to/python3.12 picks the interpreter.
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

pip() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@"
}

add_transformer_engine() {
    local missing
    missing=$(.venv/bin/python -W ignore - <<'CHECK'
import os, shutil, sys, sysconfig, torch
cuda = torch.version.cuda or "none"
if not cuda.startswith("13."):
    print(f"torch {torch.__version__} is built for CUDA {cuda}, and this builds for CUDA 13: install a torch of CUDA 13")
elif not shutil.which(os.environ.get("CXX", "c++")):
    print("no C++ compiler; install one (apt-get install g++), or set CXX")
elif not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")):
    print(f"no Python.h; install the headers (apt-get install python3.{sys.version_info.minor}-dev)")
CHECK
    )
    if [ -n "$missing" ]; then
        echo "error: --with-transformer-engine: $missing" >&2
        return 1
    fi
    echo "setup: compiling Transformer Engine's torch part (about 25 minutes of CPU time)"
    # CUDA's headers come from torch's own wheels and two more, whatever toolkit the machine has.
    pip ninja pybind11 nvidia-cuda-crt nvidia-cuda-cccl nvidia-cudnn-frontend
    PATH="$PWD/.venv/bin:$PATH" MAX_JOBS="${MAX_JOBS:-$(nproc)}" \
        NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE \
        pip --no-build-isolation -e '.[transformer-engine]'
    .venv/bin/python -W ignore -c 'import torch, transformer_engine.pytorch' # torch loads NCCL
}

engine=
case "${1:-}" in
    "") ;;
    --with-transformer-engine) engine=yes ;;
    *) echo "error: $1 is unknown; usage: scripts/setup.sh [--with-transformer-engine]" >&2; exit 2 ;;
esac

stamp=.venv/.megatron-taco-setup
# The folder too: .venv knows this checkout by its path, and both may have been moved.
wanted=$({ pwd -P; cat setup.py pyproject.toml constraints.txt megatron/compression/versions.py scripts/setup.sh; } | sha256sum | cut -d' ' -f1)
stamped() { # was the step whose stamp is $1 done with these files?
    [ -x .venv/bin/python ] && [ "$(cat "$1" 2>/dev/null)" = "$wanted" ]
}
if stamped "$stamp" && { [ -z "$engine" ] || stamped "$stamp-engine"; }; then
    echo "setup: .venv is up to date"
    exit 0
fi

if [ -x .venv/bin/python ]; then
    if ! fits .venv/bin/python; then
        echo "error: .venv holds another Python; remove it (rm -r .venv) and run scripts/setup.sh again" >&2
        exit 1
    fi
else
    python=$(find_python)
    echo "setup: making .venv with $("$python" --version) ($python)"
    "$python" -m venv .venv
fi
if ! stamped "$stamp"; then
    echo "setup: installing (torch's CUDA build is about 5 GB on disk; a few minutes)"
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1 && ! .venv/bin/python -m ensurepip >/dev/null 2>&1; then
        echo "error: .venv has no pip; remove it (rm -r .venv) and run scripts/setup.sh again" >&2
        exit 1
    fi
    pip -e '.[dev]'
    .venv/bin/python -W ignore -c 'import torch, triton, megatron.core, megatron.compression, taco_kernels'
    echo "$wanted" >"$stamp"
fi
if [ -n "$engine" ]; then
    add_transformer_engine
    echo "$wanted" >"$stamp-engine"
fi
echo "setup: done"
