#!/usr/bin/env bash
# Runs tests with other versions: ./scripts/test_versions.sh TORCH TRITON [MEGATRON_CORE] [PYTHON] [-- pytest arguments]
#   for example 2.15.0 3.9.0, or 2.13.0 3.7.1 0.19.2 3.13
#   MEGATRON_CORE  a release of the package index, or the folder of a checkout of Megatron-LM; default: as constraints.txt
#   PYTHON         3.12 or 3.13, or the path of one; default 3.12
# The environment is a folder of .venvs, made once a combination and kept (about 5 GB each). Without pytest
# arguments: unit tests, kernels, and the distributed tests that lean on what versions change. The last line
# is a row of the table in docs/versions.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    echo "usage: scripts/test_versions.sh TORCH TRITON [MEGATRON_CORE] [PYTHON] [-- pytest arguments]" >&2
    exit 2
}

pinned() { # the version of $1 in constraints.txt
    sed -n "s/^$1==//p" constraints.txt
}

find_python() { # the interpreter of version $1, or at the path $1
    local candidate
    for candidate in "python$1" "$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1"*/bin/python; do
        # A pyenv shim answers to the name and then refuses to run, so each is started.
        if [ ! -d "$candidate" ] && "$candidate" -c 'import venv' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "error: no Python $1 found; give the path of one as the fourth argument" >&2
    return 1
}

words=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    words+=("$1")
    shift
done
[ $# -eq 0 ] || shift
[ "${#words[@]}" -ge 2 ] && [ "${#words[@]}" -le 4 ] || usage
torch=${words[0]}
triton=${words[1]}
core=${words[2]:-$(pinned megatron-core)}
python=$(find_python "${words[3]:-3.12}")
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

core_name=$core
[ ! -d "$core" ] || core_name=checkout
environment=.venvs/torch-$torch-triton-$triton-core-$core_name-python-$version
pip() { # without the constraints that this machine may have for others: versions are those asked for
    PIP_CONSTRAINT=/dev/null "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

# The other packages as in constraints.txt, so that a difference is that of the versions asked for.
if [ ! -f "$environment/.complete" ]; then
    echo "test_versions: making $environment (torch's CUDA build is about 5 GB on disk; a few minutes)"
    "$python" -m venv "$environment"
    grep -v -E '^(torch|triton|megatron-core)==' constraints.txt >"$environment/constraints.txt"
    pip "torch==$torch"
    pip --no-deps "triton==$triton" # torch's wheels name another one where both are mixed
    pip -c "$environment/constraints.txt" einops matplotlib numpy packaging psutil pydantic pytest pytest-timeout \
        pytest-xdist PyYAML regex ruff safetensors sentencepiece 'setuptools<82' tensorboard tokenizers tqdm transformers
    [ -d "$core" ] || pip --no-deps "megatron-core==$core"
    touch "$environment/.complete"
fi

# This checkout first: it has a folder megatron without __init__.py, which a Megatron-LM on the path extends.
export PYTHONPATH="$PWD" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONDONTWRITEBYTECODE=
if [ -d "$core" ]; then
    export PYTHONPATH="$PWD:$(cd "$core" && pwd)"
    MEGATRON_COMPRESSION_MEGATRON_CORE=$(sed -n 's/^\(MAJOR\|MINOR\) = //p' "$core/megatron/core/package_info.py" | paste -sd.)
    export MEGATRON_COMPRESSION_MEGATRON_CORE
fi
# Kernels that another Triton has compiled must not be taken for this one's.
export TRITON_CACHE_DIR="$PWD/$environment/triton"

if [ $# -eq 0 ]; then
    set -- -m "not thorough" tests/unit tests/kernels tests/distributed/test_collectives.py \
        tests/distributed/test_fsdp2.py tests/distributed/test_fsdp2_groups.py tests/distributed/test_ddp.py \
        tests/distributed/test_training.py
fi
report=$environment/tests.xml
status=0
"$environment/bin/python" -m pytest -p no:cacheprovider -q --junit-xml="$report" "$@" || status=$?

# What pytest counted, whatever its arguments have it print; a test whose set-up failed has failed.
counts=$("$environment/bin/python" - "$report" <<'END'
import sys
from xml.etree import ElementTree

suite = ElementTree.parse(sys.argv[1]).getroot().find("testsuite")
tests, failures, errors, skipped = (int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped"))
failed = failures + errors
print(f"{tests - failed - skipped} | {failed}")
END
)
echo "| $torch | $triton | $core_name | $version | $(date +%F) | $counts |"
exit "$status"
