"""Megatron-LM's training loop: the flags, ``enable``, what is checked and chosen before the first
iteration, and our entrypoints' datasets and forward step.

enable.py           add_arguments and enable, the two lines of an entrypoint
loop.py             the loop as the host of a session
checks.py           what the command line names: data, tokenizer, folders
checkpoints.py      why a checkpoint cannot be saved or loaded
implementation.py   which layers the model is built of
entrypoint.py       what pretrain_gpt.py and pretrain_qwen.py give to ``pretrain``
model_alone.py      a model without a training run
"""

import importlib.util
import os
import re
import sys
from pathlib import Path

from megatron.compression.errors import InputError, one_line_errors
from megatron.compression.versions import MEGATRON_CORE_AT_RISK, MEGATRON_CORE_SERIES


def prepare() -> None:
    """Prepare the process for Megatron; an entrypoint calls it before megatron.training is
    imported.

    It checks the version of megatron-core, hides a Transformer Engine that cannot run, puts the CPU
    stand-ins in place where there is no CUDA, and makes the repairs that every run needs. What is
    wrong ends the process with one line.
    """
    with one_line_errors():
        check_megatron_core(find_megatron_core())
        from megatron import host
        from megatron.compression.frontends.megatron_lm import implementation
        from megatron.compression.patches import gaps

        # Before megatron.core is imported, which looks for it at import.
        implementation.transformer_engine()
        # Nothing is replaced where there is CUDA.
        host.install()
        gaps.use_shipped_helpers()
        gaps.make_torch_optimizers_resumable()
        gaps.fuse_torch_adam()
        gaps.launch_optimizers_together()


def find_megatron_core() -> tuple[str, Path] | None:
    """Return the version and the folder of the megatron-core that an import would find; None: there
    is none.

    Nothing is imported: another version may fail to import.
    """
    for folder in importlib.util.find_spec("megatron").submodule_search_locations:
        info = Path(folder) / "core" / "package_info.py"
        if not info.is_file():
            continue
        text = info.read_text()
        numbers = []
        for name in ("MAJOR", "MINOR", "PATCH"):
            # package_info.py has a line a number.
            match = re.search(rf"^{name} = (\d+)", text, re.M)
            numbers.append(match[1] if match else "?")
        return ".".join(numbers), info.parent
    return None


def check_megatron_core(installed: tuple[str, Path] | None) -> None:
    """Refuse another series of megatron-core than the one whose symbols are replaced by name.

    Args:
        installed: its version and folder, as ``find_megatron_core`` returns them.

    Raises:
        InputError: another series, or none.
    """
    fix = (
        f"pip install 'megatron-core=={MEGATRON_CORE_SERIES}.*', or put that release of "
        "Megatron-LM first on the path"
    )
    if installed is None:
        raise InputError(
            f"megatron-core {MEGATRON_CORE_SERIES} is required, none is installed: {fix}"
        )
    version, folder = installed
    if version.startswith(f"{MEGATRON_CORE_SERIES}."):
        return
    series = ".".join(version.split(".")[:2])
    if os.environ.get(MEGATRON_CORE_AT_RISK) == series:
        print(
            f"compression: megatron-core {version} has not been tested, {MEGATRON_CORE_SERIES} "
            "has: compare the first losses with a run without compression "
            f"({MEGATRON_CORE_AT_RISK}={series})",
            file=sys.stderr,
        )
        return
    raise InputError(
        f"megatron-core {MEGATRON_CORE_SERIES} is required, {version} is in {folder}: {fix}; at "
        f"your own risk set {MEGATRON_CORE_AT_RISK}={series}"
    )
