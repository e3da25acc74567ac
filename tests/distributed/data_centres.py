"""Starts a run of several data centres on this host: each a job of its own, over gloo."""

import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.forked import run_and_keep
from tests.distributed.launch import Run, _fork, free_port, tiny_flags

OPTIMIZER = ("--use-distributed-optimizer", "--bf16", "--outer-timeout-minutes", "1")


@dataclass
class Centres:
    """The runs of all data centres, by number."""

    runs: list[Run]

    @property
    def parameters(self) -> list[list[dict[str, str]]]:
        """Hashes of the ranks' parameters, by data centre."""
        return [run.parameters for run in self.runs]


def flags_of(number: int, data_centres: int, port: int, *flags: str) -> list[str]:
    """The command line of a tiny run in one data centre.

    Args:
        number: the data centre's.
        data_centres: how many there are.
        port: where they meet.
        flags: added at the end.
    """
    return tiny_flags(
        *OPTIMIZER,
        "--data-centres",
        str(data_centres),
        "--data-centre-rank",
        str(number),
        "--outer-address",
        f"127.0.0.1:{port}",
        *flags,
    )


def pretrain_in_data_centres(
    *flags: str,
    data_centres: int = 2,
    ranks: int = 1,
    timeout: float = 300,
    check: bool = True,
    through: str | None = None,
    own_flags: dict[int, list[str]] | None = None,
    env: dict[str, str] | None = None,
) -> Centres:
    """Run pretrain_gpt.py in several data centres to the end.

    Args:
        flags: of all data centres.
        data_centres: how many there are.
        ranks: in each.
        timeout: seconds for each.
        check: require that all succeed.
        through: a script that is given the entrypoint as its first argument, in place of it.
        own_flags: of one data centre, by its number.
        env: further environment variables.
    """
    script = "pretrain_gpt.py"
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="megatron-taco-") as folder:
        started = []
        for number in range(data_centres):
            results = Path(folder, str(number))
            results.mkdir()
            words = flags_of(number, data_centres, port, *flags, *(own_flags or {}).get(number, []))
            command = [script, *words] if through is None else [through, script, *words]
            run = _fork(ranks, env or {}, run_and_keep, command[0], command[1:], results)
            started.append(run)
        try:
            runs = [run.finish(timeout, grace=20) for run in started]
        finally:
            for run in started:
                run.kill()
        for number, run in enumerate(runs):
            files = [Path(folder, str(number), str(rank)) for rank in range(ranks)]
            if all(file.exists() for file in files):
                run.ranks = [pickle.loads(file.read_bytes()) for file in files]
    for number, run in enumerate(runs):
        good = run.returncode == 0 and len(run.ranks) == ranks
        assert good or not check, (
            f"data centre {number}: exit status {run.returncode}:\n{run.output[-6000:]}"
        )
    return Centres(runs)
