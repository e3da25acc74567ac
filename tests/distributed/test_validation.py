"""--validate-uncompressed: evaluations without the codecs' noise, and training is what it was."""

from tests.distributed.launch import Run, pretrain, tiny_flags

LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
CODECS = """--taco format=int4 --compression-min-mb 0 --pp-compression tah-quant
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"""
"""Coarse in both dimensions, and recomputed under no_grad."""


def flags(*more: str) -> list[str]:
    """TP 2 x PP 2, an evaluation every other iteration and two at the end."""
    words = [*LAYOUT.split(), *more]
    return tiny_flags(*words, hidden_size="64", eval_interval="2", eval_iters="1")


def rows(run: Run, phase: str) -> list[list[dict]]:
    """The ledger of each rank in a phase, without what never is compressed."""
    return [
        [row for row in rank.ledger if row["phase"] == phase and not row["traffic"].endswith("other")]
        for rank in run.ranks
    ]


def test_evaluations_are_uncompressed_and_training_is_what_it_was(tmp_path) -> None:
    """Compressed with the flag and without; and an uncompressed evaluation of the former's checkpoint."""
    saved = str(tmp_path / "saved")
    words = [*flags(*CODECS.split()), "--save", saved, "--save-interval", "4", "--validate-uncompressed"]
    exact = pretrain(*words, ranks=4)
    evaluated = pretrain(*flags("--load", saved), ranks=4)
    coded = pretrain(*flags(*CODECS.split()), ranks=4)
    # Losses of validation and test data: to the last bit those of an uncompressed evaluation.
    found, noisy, plain = (run.ranks[-1].validation for run in (exact, coded, evaluated))
    assert len(found) == len(noisy) == 4 and len(plain) == 2 and found[2:] == plain
    assert all(with_flag != without for with_flag, without in zip(found, noisy, strict=True))
    assert "evaluation sends activations uncompressed (--validate-uncompressed)" in exact.output
    # Training: losses, parameters and bytes are those without the flag.
    assert exact.losses == coded.losses and len(exact.losses) == 4 and exact.parameters == coded.parameters
    assert rows(exact, "train") == rows(coded, "train")
    assert {row["kind"] for rank in rows(exact, "train") for row in rank} == {"compressed", "off"}
    # The ledger: evaluations have a kind of their own; four here, two in the uncompressed run.
    for with_flag, uncompressed in zip(rows(exact, "eval"), rows(evaluated, "eval"), strict=True):
        assert with_flag and {row["kind"] for row in with_flag} == {"evaluation"}
        assert {row["kind"] for row in uncompressed} == {"off"}
        sent = {(row["traffic"], row["operation"]): row["sent_bytes"] for row in with_flag}
        assert sent == {(row["traffic"], row["operation"]): 2 * row["sent_bytes"] for row in uncompressed}
