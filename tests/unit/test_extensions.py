"""Fusions whose extension is not installed."""

import importlib.util
from types import SimpleNamespace

from megatron.compression.startup import extensions


def _args(**changes) -> SimpleNamespace:
    values = dict(
        transformer_impl="local",
        masked_softmax_fusion=True,
        apply_rope_fusion=True,
        no_persist_layer_norm=False,
    )
    return SimpleNamespace(**{**values, **changes})


def test_missing_extensions_are_switched_off_and_said(monkeypatch) -> None:
    """Each fusion that cannot run is off, with a line that names the flag; what was off already is silent."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    args = _args(apply_rope_fusion=False)
    lines = extensions.missing_extension_overrides(args)
    assert not args.masked_softmax_fusion and not args.apply_rope_fusion and args.no_persist_layer_norm
    assert len(lines) == 2 and any("--no-masked-softmax-fusion" in line for line in lines)


def test_installed_extensions_and_transformer_engine_are_left_alone(monkeypatch) -> None:
    """Nothing changes where the extension is there, or where another implementation needs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    args = _args()
    assert extensions.missing_extension_overrides(args) == []
    assert args == _args()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    args = _args(transformer_impl="transformer_engine")
    assert extensions.missing_extension_overrides(args) == []
    assert args == _args(transformer_impl="transformer_engine")
