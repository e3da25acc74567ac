"""The grammar of codecs: names parse back, unknown ones are one line, others may register."""

import ast
import dataclasses
import importlib.metadata
import inspect
import itertools
import random
import sys
import textwrap
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from megatron.compression import CompressionConfigError, register_codec
from megatron.compression.codecs import CODECS, GRADIENT_COMPRESSORS, parse_codec
from megatron.compression.codecs.identity import IdentityCodec
from megatron.compression.codecs.registry import Registry, settings_of


@dataclass(frozen=True)
class HalfCodec(IdentityCodec):
    """A codec of one's own: bf16."""

    loud: bool = False
    """Nothing."""

    level: int | None = None

    def payload_bytes(self, shape) -> int:
        return 2 * torch.Size(shape).numel()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().reshape(x.shape[0], -1).contiguous().view(torch.uint8)

    def decode(self, payloads, shape, dtype):
        return payloads.view(torch.bfloat16).reshape(len(payloads), *shape).to(dtype)


@dataclass(frozen=True)
class NoCodec:
    """Something else."""


class NotFrozen:
    """Settings that could change."""


@dataclass(frozen=True)
class Divides:
    """Whose check fails by itself."""

    size: int = 1

    def __post_init__(self) -> None:
        assert 1 // self.size <= 1


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        ("int6", "int6"),
        ("int6:scales=single,group=64", "int6:group=64,scales=single"),
        ("int4:group=32,normalize=standardize", "int4:group=32,normalize=standardize"),
        ("int4:normalize=standardize,hadamard=false", "int4:normalize=standardize"),
        ("taco", "taco"),
        ("taco:format=fp8-e5m2,group=256", "taco:format=fp8-e5m2,group=256"),
        ("sdp4bit:intra=4,inter=4", "sdp4bit:intra=4"),
        ("tah-quant:ratio=0.5,tile=64", "tah-quant:ratio=0.5"),
        ("tah-quant:ratio=0.123456789", "tah-quant:ratio=0.123456789"),
        ("tah-quant:ratio=0.50000", "tah-quant:ratio=0.5"),
        ("lossless:escapes=1e-07", "lossless:escapes=1e-07"),
        ("int5/int6", "int5/int6"),
        (f"{__name__}:HalfCodec", f"{__name__}:HalfCodec"),
        (f"{__name__}:HalfCodec:loud=on,level=3", f"{__name__}:HalfCodec:loud=on,level=3"),
    ],
)
def test_names_parse_back(spec: str, canonical: str) -> None:
    """One codec has one name, whatever was written; the name gives an equal codec."""
    codec = parse_codec(spec)
    assert codec.name == canonical
    assert parse_codec(codec.name) == codec


@pytest.mark.parametrize(
    "registry", [CODECS, GRADIENT_COMPRESSORS], ids=lambda registry: registry.noun
)
def test_a_long_number_in_a_name_parses_back(registry: Registry) -> None:
    """Every setting that is a number with a point, at values of up to 17 digits."""
    tried = 0
    generator = random.Random(0)
    for name in registry.names():
        cls, fixed = registry.entry(name)
        for setting, field in settings_of(cls, fixed).items():
            if field.type is not float:
                continue
            for _ in range(20):
                # Within a tenth of the default every setting of ours is valid.
                codec = cls(**fixed, **{setting: field.default * generator.uniform(0.9, 1.1)})
                assert registry.parse(registry.spec(codec)) == codec
                tried += 1
    assert tried


@pytest.mark.parametrize("name", CODECS.names())
def test_every_registered_codec_has_its_name(name: str) -> None:
    """Names of its gradients' codec and of both hops of a collective parse back, too."""
    codec = parse_codec(name)
    assert codec.name == name
    for part in (codec.backward, *codec.hops):
        assert parse_codec(part.name) == part


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "int7",
            "codec 'int7' is unknown; choose one of .*int6.*, or MODULE:CLASS; did you mean int",
        ),
        ("tagc", "tagc compresses gradients only; give it to --dp-compression"),
        ("", "codec '' is unknown"),
        (
            "int6:gruop=64",
            "int6: no setting 'gruop'; choose among group, scales, hadamard, normalize",
        ),
        ("int6:group", "int6: group needs a value, as in group=VALUE"),
        ("taco:fp8-e4m3", "no setting 'fp8-e4m3'; choose .*; did you mean format=fp8-e4m3?"),
        ("taco:int8,128", "did you mean format=int8?"),
        ("int6:64", "no setting '64'; choose among .*; did you mean group=64?"),
        ("int6:on", "did you mean hadamard=on or outliers=on?"),
        ("identity:x=1", "identity: no setting 'x'; choose among none"),
        (
            "int6:group=48",
            "int6:group=48: group=48 is not supported; choose one of 32, 64, 128, 256",
        ),
        ("int6:hadamard=maybe", "int6:hadamard=maybe must be on or off"),
        ("int6:scales=dual", "scales=dual belongs to taco"),
        ("int6:normalize=standardize,hadamard=on", "drop hadamard=on"),
        ("taco:scales=signed", "scales=signed belongs to the int codecs"),
        ("sdp4bit:intra=5", "sdp4bit:intra=5: "),
        ("tah-quant:ratio=x", "tah-quant:ratio=x must be a number"),
        ("tah-quant:low=5", "tah-quant:low=5: "),
        ("int6/sdp4bit:group=64", "the two codecs cut a tensor differently"),
        (
            "int6:group=64:scales=single",
            "64:scales=single must be a whole number; commas separate settings",
        ),
        ("no.such.module:Codec", "No module named .* put its folder on PYTHONPATH"),
        (f"{__name__}:NotFrozen", "NotFrozen must be a frozen dataclass"),
        (f"{__name__}:Divides:size=0", "Divides:size=0: .*zero"),
        (f"{__name__}:Missing", "has no attribute 'Missing'"),
        (f"{__name__}:NoCodec", "NoCodec is no megatron.compression.Codec"),
    ],
)
def test_what_is_unknown_is_refused(spec: str, message: str) -> None:
    """One line that says what there is."""
    with pytest.raises(CompressionConfigError, match=message) as error:
        parse_codec(spec)
    assert "\n" not in str(error.value)


def test_a_name_is_given_once() -> None:
    """The same class may come again (a module loaded anew); another one may not."""
    with pytest.raises(
        CompressionConfigError,
        match=r"the codec 'int6' is \S+IntCodec already, and \S+HalfCodec wants the name",
    ):
        register_codec("int6")(HalfCodec)
    register_codec("identity")(IdentityCodec)


def test_others_register_by_an_entry_point(monkeypatch) -> None:
    """Installed packages' codecs are found by name, and never take the name of ours."""
    module = ModuleType("somebodys_package")
    module.HalfCodec = HalfCodec
    monkeypatch.setitem(sys.modules, module.__name__, module)
    point = importlib.metadata.EntryPoint(
        "half", "somebodys_package:HalfCodec", "megatron_taco.codecs"
    )
    taken = importlib.metadata.EntryPoint(
        "int6", "somebodys_package:HalfCodec", "megatron_taco.codecs"
    )

    def entry_points(group: str) -> list:
        return [point, taken] if group == "megatron_taco.codecs" else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    registry = Registry("codec", "megatron_taco.codecs", ("megatron.compression.codecs",))
    registry._entries.update(CODECS._entries)
    assert "half" in registry.names()
    codec = registry.parse("half:loud=on")
    assert codec == HalfCodec(loud=True) and registry.spec(codec) == "half:loud=on"
    assert type(registry.parse("int6")) is not HalfCodec


def _documented_fields(cls: type) -> set[str]:
    """The fields of a dataclass, its parents' too, with a string under them."""
    fields = set()
    for parent in cls.__mro__:
        if not dataclasses.is_dataclass(parent):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(parent))).body
        for statement, text in itertools.pairwise(definition.body):
            is_string = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(statement, ast.AnnAssign) and is_string and len(text.value.value) > 10:
                fields.add(statement.target.id)
    return fields


def test_every_setting_of_ours_is_documented() -> None:
    """The documentation is the string under its field."""
    for registry in (CODECS, GRADIENT_COMPRESSORS):
        for name in registry.names():
            cls, fixed = registry.entry(name)
            assert settings_of(cls, fixed).keys() <= _documented_fields(cls), name
