"""What users type for a setting, and refusals in their words."""

import dataclasses
import pickle

import pytest

from megatron import compression
from megatron.compression import CompressionConfigError
from megatron.compression.errors import SettingError, argument, refused_for, setting, spelled
from megatron.compression.names import FLAG_NAMES, FLAGS, PARALLELISMS, PYTHON_NAMES, Names

BRIDGE_NAMES = Names(
    {"tensor_parallel.overlap": "overlap", "tensor_parallel.min_mb": "min_mb"},
    {"transformer_impl": "cfg.model.transformer_impl"},
)


def refusal() -> SettingError:
    """The example of the class' docstring."""
    return SettingError(
        "tensor_parallel.overlap",
        "halves",
        f"needs {argument('transformer_impl')} local: other layers wait for a sum",
        f"give local, or drop {setting('tensor_parallel.overlap')}",
    )


def test_a_refusal_names_flags_until_a_front_end_spells_it() -> None:
    """The error itself is in the words of the command line."""
    assert str(refusal()) == (
        "--tp-compression-overlap halves needs --transformer-impl local: other layers wait for "
        "a sum; "
        "give local, or drop --tp-compression-overlap"
    )


@pytest.mark.parametrize(
    ("names", "begins", "ends"),
    [
        (
            PYTHON_NAMES,
            "TensorParallelConfig.overlap halves needs --transformer-impl local",
            "drop TensorParallelConfig.overlap",
        ),
        (BRIDGE_NAMES, "overlap halves needs cfg.model.transformer_impl local", "or drop overlap"),
    ],
    ids=["python", "bridge"],
)
def test_a_front_end_spells_name_reason_and_fix(names: Names, begins: str, ends: str) -> None:
    """All three parts of the message are in the words of that front end."""
    with pytest.raises(SettingError) as error, spelled(names):
        raise refusal()
    assert str(error.value).startswith(begins) and str(error.value).endswith(ends)


def test_the_outermost_front_end_decides() -> None:
    """A config checks itself in Python's names; the command line that makes it has flags."""
    with pytest.raises(SettingError) as error, spelled(FLAG_NAMES), spelled(PYTHON_NAMES):
        raise refusal()
    assert str(error.value) == str(refusal())


def test_a_message_without_one_setting_resolves_references_too() -> None:
    """A message about several settings is text with references to them."""
    error = CompressionConfigError(
        f"give {setting('data_parallel.weights')} and {argument('bf16')}"
    )
    assert str(error) == "give --dp-compression WEIGHTS and --bf16"


def test_a_codecs_refusal_gets_the_settings_name() -> None:
    """A codec does not know whose value it is; a setting that is named already stays."""
    with pytest.raises(SettingError) as error, refused_for("expert_parallel.backward"):
        raise CompressionConfigError("codec 'int' is unknown")
    assert str(error.value) == "--ep-compression BACKWARD: codec 'int' is unknown"
    with pytest.raises(SettingError) as error, refused_for("expert_parallel.backward"):
        raise refusal()
    assert error.value.path == "tensor_parallel.overlap"


def test_what_a_user_typed_is_shown_as_it_is() -> None:
    """A value that looks like a reference is no reference."""
    error = SettingError("report", "{transport}", "is no folder")
    assert str(error) == "--compression-report {transport} is no folder"


def test_refusals_survive_a_process_and_a_copy_of_their_text() -> None:
    """Ranks hand errors over by pickle; megatron-core makes a new one from a module's text."""
    error = pickle.loads(pickle.dumps(refusal()))
    assert str(error) == str(refusal())
    text = f"{error} when instantiating Attention"
    assert str(type(error)(text)) == text


def test_every_setting_has_a_name_in_each_front_end() -> None:
    """No flag's field is shown as a path."""
    for paths in FLAGS.values():
        for path in paths:
            assert FLAG_NAMES.of(path).startswith("--")
            assert PYTHON_NAMES.of(path) != path


def test_settings_of_every_parallelism_are_exported_and_have_help() -> None:
    """Users import ``TensorParallelConfig`` from megatron.compression, and read a flag's help."""
    for kind in PARALLELISMS.values():
        config = getattr(compression, kind.config)
        assert config.parallelism is kind and kind.config in compression.__all__
        for field in dataclasses.fields(config):
            is_flag = any(f"{kind.name}.{field.name}" in paths for paths in FLAGS.values())
            assert not is_flag or len(field.metadata["help"]) > 20, field.name
    assert compression.CaatNetConfig().enabled is False


def test_scripts_reports_and_flags_share_one_table() -> None:
    """The flag of a kind compresses the traffic that the ledger counts under its prefix."""
    from megatron.compression.communication.ledger import DIMENSIONS, TRAFFIC

    assert list(DIMENSIONS.values()) == [kind.traffic for kind in PARALLELISMS.values()]
    for kind in PARALLELISMS.values():
        assert FLAGS[kind.flag][0] == f"{kind.name}.compression"
        assert any(traffic.startswith(kind.traffic) for traffic in TRAFFIC)
