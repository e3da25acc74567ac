"""What is checked and chosen before the first iteration, and our entrypoints' datasets and forward step."""

import importlib.util
import re
from pathlib import Path

from megatron.compression.errors import InputError, one_line_errors
from megatron.compression.versions import MEGATRON_CORE_SERIES


def prepare() -> None:
    """What an entrypoint calls first, before megatron.training is imported: checks the version of
    megatron-core, hides a Transformer Engine that cannot run, puts the CPU stand-ins in place where there is
    no CUDA, and makes the repairs that every run needs."""
    with one_line_errors():
        check_megatron_core(find_megatron_core())
        from megatron import host
        from megatron.compression.frontends.megatron_lm import implementation
        from megatron.compression.patches import gaps

        implementation.transformer_engine()
        host.install()
        gaps.use_shipped_helpers()
        gaps.make_torch_adam_resumable()
        gaps.fuse_torch_adam()


def find_megatron_core() -> tuple[str, Path] | None:
    """The version and the folder of the megatron-core that an import would find; None: none."""
    for folder in importlib.util.find_spec("megatron").submodule_search_locations:
        info = Path(folder) / "core" / "package_info.py"
        if info.is_file():
            text = info.read_text()
            parts = [
                re.search(rf"^{name} = (\d+)", text, re.M) for name in ("MAJOR", "MINOR", "PATCH")
            ]
            return ".".join(part[1] if part else "?" for part in parts), info.parent
    return None


def check_megatron_core(found: tuple[str, Path] | None) -> None:
    """Raises: InputError: another series of megatron-core, or none: its symbols are replaced by name."""
    if found is None or not found[0].startswith(f"{MEGATRON_CORE_SERIES}."):
        there = f"{found[0]} is in {found[1]}" if found else "none is installed"
        raise InputError(
            f"megatron-core {MEGATRON_CORE_SERIES} is required, {there}: pip install "
            f"'megatron-core=={MEGATRON_CORE_SERIES}.*', or put that release of Megatron-LM first on the path"
        )
