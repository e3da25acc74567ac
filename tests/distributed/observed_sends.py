"""When a schedule waits for its point-to-point sends, seen below the pipeline exchange."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def observed_sends() -> Iterator[dict[int, int]]:
    """{number of a send: how many had been started when it was waited for}.

    Not of sends that share their request with a receive, as batched ones do on NCCL.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    waits, started = {}, 0

    class Observed:
        def __init__(self, request, number: int) -> None:
            self.request, self.number = request, number

        def wait(self) -> None:
            assert self.number not in waits, "waited for twice"
            waits[self.number] = started
            self.request.wait()

    def observe(send):
        def wrapper(**arguments):
            nonlocal started
            requests = send(**arguments)
            order = ("send_prev", "recv_prev", "send_next", "recv_next")
            names = [n for n in order if arguments[f"tensor_{n}"] is not None]
            if isinstance(requests, list) and len(requests) != len(names):
                names = ["send" if all(name.startswith("send") for name in names) else "recv"]
            named = requests if isinstance(requests, dict) else dict(zip(names, requests, strict=True))
            for name in list(named):
                if name.startswith("send"):
                    named[name], started = Observed(named[name], started), started + 1
            return named if isinstance(requests, dict) else list(named.values())

        return wrapper

    originals = {name: getattr(p2p_communication, name) for name in ("_p2p_ops", "_batched_p2p_ops")}
    for name, original in originals.items():
        setattr(p2p_communication, name, observe(original))
    try:
        yield waits
    finally:
        for name, original in originals.items():
            setattr(p2p_communication, name, original)
