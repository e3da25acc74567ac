"""What is said and refused under versions of torch, Triton and megatron-core that were not tried."""

import functools
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import triton
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from megatron.compression import CompressionConfig, CompressionConfigError
from megatron.compression.caat_net.config import CaatNetConfig
from megatron.compression.data_parallel.config import DataParallelConfig
from megatron.compression.errors import InputError
from megatron.compression.flags import resolve
from megatron.compression.frontends import megatron_lm
from megatron.compression.fsdp2 import attach
from megatron.compression.patches import symbols
from megatron.compression.session import Host, Session
from megatron.compression.tensor_parallel.config import TensorParallelConfig
from megatron.compression.tensor_parallel.hooks import TensorParallel, reason_without_site
from megatron.compression.versions import MEGATRON_CORE_AT_RISK
from tests.unit.megatron_args import EXPERTS, parsed


class LoopThatKeepsLines(Host):
    """A loop that keeps lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def unknown_triton(monkeypatch) -> None:
    """A GPU, and a Triton that has never been tried."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(triton, "__version__", "3.11.2")


SLOW = "fast kernel launches are off, since Triton 3.11.2 is none of 3.6 to 3.9: each launch takes the host 22 "


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "none"])
def test_slow_launches_are_said_once_where_anything_is_compressed(
    codec: str, unknown_triton
) -> None:
    host = LoopThatKeepsLines()
    session = Session(CompressionConfig(data_parallel=DataParallelConfig(compression=codec)), host)
    session.attach_wrapped([])
    slow = [line for line in host.lines if line.startswith(f"compression: {SLOW}")]
    assert len(slow) == (codec == "int8")


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "none"])
def test_slow_launches_are_said_under_fsdp2(codec: str, unknown_triton) -> None:
    lines: list[str] = []
    with pytest.raises(Exception, match="call fully_shard"):
        attach(torch.nn.Linear(2, 2), gather="none", reduce=codec, log=lines.append)
    slow = [line for line in lines if line.startswith(f"compression: FSDP2: {SLOW}")]
    assert len(slow) == (codec == "int8")


def test_another_series_of_megatron_core_is_taken_at_ones_own_risk(monkeypatch, capsys) -> None:
    """The variable names the series; the log has a line."""
    monkeypatch.setenv(MEGATRON_CORE_AT_RISK, "0.20")
    megatron_lm.check_megatron_core(("0.20.3", Path("/a/core")))
    line = capsys.readouterr().err
    assert line.startswith("compression: megatron-core 0.20.3 has not been tested, 0.19 has: ")
    assert line.count("\n") == 1
    with pytest.raises(InputError, match=rf"at your own risk set {MEGATRON_CORE_AT_RISK}=0\.21$"):
        megatron_lm.check_megatron_core(("0.21.0", Path("/a/core")))
    megatron_lm.check_megatron_core(("0.19.2", Path("/a/core")))
    assert not capsys.readouterr().err


def test_the_variable_is_none_that_is_misspelt(monkeypatch) -> None:
    monkeypatch.setenv(MEGATRON_CORE_AT_RISK, "0.20")
    resolve(parsed("--taco", tensor_model_parallel_size=2))
    monkeypatch.setenv(MEGATRON_CORE_AT_RISK + "S", "0.20")
    with pytest.raises(CompressionConfigError, match=f"did you mean {MEGATRON_CORE_AT_RISK}"):
        resolve(parsed("--taco", tensor_model_parallel_size=2))


class TwoRanks:
    """A stand-in for a process group of two ranks."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def output_layer(output_dtype: torch.dtype | None) -> torch.nn.Module:
    """Return a stand-in for a model of megatron-core 0.20 that has only an output layer."""
    layer = ColumnParallelLinear.__new__(ColumnParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.config = SimpleNamespace(
        params_dtype=torch.bfloat16, defer_embedding_wgrad_compute=False, sequence_parallel=False
    )
    layer.tp_group = TwoRanks()
    layer.output_dtype = output_dtype
    layer.gather_output = False
    layer.sequence_parallel = False
    model = torch.nn.Module()
    model.output_layer = layer
    return model


@pytest.mark.slow
def test_logits_of_another_type_are_refused() -> None:
    """megatron-core 0.20's ``logit_dtype``: our product would give bf16 without a word."""
    session = Session(CompressionConfig(tensor_parallel=TensorParallelConfig(compression="int8")))
    dimension: TensorParallel = session.dimensions["tensor_parallel"]
    line = (
        r"cannot compress output_layer: its output is float32; drop --output-logit-dtype "
        r"\(logit_dtype of the model\)"
    )
    with pytest.raises(CompressionConfigError, match=line):
        dimension.attach([output_layer(torch.float32)])
    for dtype in (None, torch.bfloat16):
        assert dimension.refusal([output_layer(dtype)]) is None


@pytest.mark.slow
def test_logits_of_another_type_are_refused_in_a_caat_net() -> None:
    """Its output layer is of the same product, whatever else is compressed; the line names the flag."""
    session = Session(CompressionConfig(caat_net=CaatNetConfig(sync_fraction=0.5)))
    line = (
        r"--caat-net-sync-fraction does not cover output_layer: its output is float32; "
        r"drop --output-logit-dtype \(logit_dtype of the model\)$"
    )
    model = output_layer(torch.float32)
    session.dimensions["tensor_parallel"].attach([model])
    with pytest.raises(CompressionConfigError, match=line):
        session.dimensions["caat_net"].attach([model])
    for dtype in (None, torch.bfloat16):
        model = output_layer(dtype)
        assert reason_without_site(model.output_layer) is None
        session.dimensions["tensor_parallel"].attach([model])
        assert model.output_layer.site is not None


@pytest.mark.parametrize("name", ["moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"])
def test_dispatchers_that_shorten_messages_themselves_are_refused(name: str) -> None:
    """megatron-core 0.20's mxfp8 on the wire of experts."""
    one_way = dict(tensor_model_parallel_size=1)
    flags = ("--ep-compression", "int8")
    resolve(parsed(*flags, **EXPERTS | one_way | {name: "bf16"}))
    with pytest.raises(CompressionConfigError, match="mxfp8 shortens what --ep-compression"):
        resolve(parsed(*flags, **EXPERTS | one_way | {name: "mxfp8"}))


def traced(function):
    """Decorate as megatron-core 0.20 does ``evaluate``."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


def counting(original):
    """Replace a function by one that adds 1 to its result."""

    def call(*args, **kwargs):
        return original(*args, **kwargs) + 1

    return call


def test_a_decorated_function_is_replaced_by_its_own_parameters() -> None:
    """Of megatron-core 0.20, whose ``evaluate`` is traced: the check sees through the decorator."""
    module, other_module = ModuleType("a_module"), ModuleType("another_module")

    @traced
    def evaluate(forward_step_func, data_iterator, model):
        return model

    module.evaluate = other_module.evaluate = evaluate
    parameters = ("forward_step_func", "data_iterator", "model")
    symbols.replace(module, "evaluate", parameters, counting)
    assert module.evaluate(None, None, 4) == 5
    with pytest.raises(symbols.PatchError):
        symbols.replace(other_module, "evaluate", (*parameters, "another"), counting)
