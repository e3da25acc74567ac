"""Which samples and which folders are this data centre's.

All data centres build the same dataset, of all their samples together, and take turns: of the
micro-batches that one data-parallel group over all of them would read, each takes its own.

    samples of a micro-batch   | rank 0 | rank 1 | rank 0 | rank 1 |
    data centre                    0        0        1        1
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

FOLDER = "data_centre_"
"""How the folder of a data centre's checkpoints begins, inside --save and --load."""
_TRACKER = "latest_checkpointed_iteration.txt"


def take_share(loader: Any, data_centres: int, data_centre: int) -> None:
    """Change a training data loader to read this data centre's samples alone.

    Args:
        loader: of ``build_pretraining_data_loader``; its sampler counts this data centre's samples
            only. Another kind of loader, a user's own, is left as it is.
        data_centres: how many there are.
        data_centre: this one's number.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if not hasattr(sampler, "micro_batch_times_data_parallel_size"):
        return
    # The sampler reads these when an epoch begins, which is after this.
    ranks = sampler.micro_batch_times_data_parallel_size // sampler.micro_batch_size
    sampler.data_parallel_rank += data_centre * ranks
    sampler.micro_batch_times_data_parallel_size *= data_centres
    sampler.consumed_samples *= data_centres


def use_own_folders(args: Namespace) -> None:
    """Give a data centre a folder of its own inside ``--save``, and load from it where it is there.

    A data centre without one, since there were fewer before, loads that of data centre 0. A folder
    without any is an ordinary checkpoint, which all data centres start from. Idempotent.
    """
    number = args.data_centre_rank
    if args.data_centres < 2 or number is None:
        return
    name = f"{FOLDER}{number}"
    if args.save and Path(args.save).name != name:
        args.save = str(Path(args.save) / name)
    if args.load and not Path(args.load).name.startswith(FOLDER):
        for candidate in (name, f"{FOLDER}0"):
            if (Path(args.load) / candidate / _TRACKER).is_file():
                args.load = str(Path(args.load) / candidate)
                return
