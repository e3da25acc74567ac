"""The error of every format and group size on what a run's sites send (scripts/choose_codec.py)."""

import torch

from megatron.compression.codecs import Codec, build_codec
from megatron.compression.config import TACO_FORMATS, TACO_GROUP_SIZES
from megatron.compression.tensor_parallel.guard import ErrorGuard


class CodecSurvey(ErrorGuard):
    """Stands in the place of the error guard, measures once, and takes nothing out.

    Args:
        iteration: zero-based training iteration to measure in: each site's channels, the first call of each.
        scales: as in ``--taco-scales``; with signed ones fp8, which has none, is measured with single ones.
    """

    def __init__(self, iteration: int, scales: str = "single") -> None:
        super().__init__(bound=float("inf"), group_size=max(TACO_GROUP_SIZES))
        self.iteration = iteration
        self.codecs = {
            (number_format, group_size): build_codec(
                "taco",
                format=number_format,
                group_size=group_size,
                scales="single" if scales == "signed" and number_format.startswith("fp8") else scales,
            )
            for number_format in TACO_FORMATS
            for group_size in TACO_GROUP_SIZES
        }
        self._found: dict[tuple[str, str], dict[tuple[str, int], torch.Tensor]] = {}

    def due(self, site: str, channel: str, iteration: int) -> bool:
        """See ErrorGuard."""
        return iteration == self.iteration and (site, channel) not in self._found

    def measure(self, site: str, channel: str, tensor: torch.Tensor, codec: Codec, key: int = 0) -> None:
        """See ErrorGuard: the same sample, whole groups of the largest size, in every codec."""
        exact = self._sample(tensor).float()
        signal = exact.double().square().sum()
        self._found[site, channel] = {
            name: torch.stack([(self._decoded(each, exact).double() - exact).square().sum(), signal])
            for name, each in self.codecs.items()
        }

    @staticmethod
    def _decoded(codec: Codec, x: torch.Tensor) -> torch.Tensor:
        return codec.decode(codec.encode(x), x.shape, x.dtype)

    def squares(self) -> list[dict]:
        """Rows of site, channel, format, group_size, bits a value, and the squared error and signal.

        Sums of squares over the sample, of this rank.
        """
        rows = []
        for (site, channel), measures in self._found.items():
            for (number_format, group_size), squares in measures.items():
                error, signal = squares.tolist()
                bits = 8 * self.codecs[number_format, group_size].config.bytes_per_group() / group_size
                rows.append(
                    {
                        "site": site,
                        "channel": channel,
                        "format": number_format,
                        "group_size": group_size,
                        "bits": bits,
                        "error": error,
                        "signal": signal,
                    }
                )
        return rows
