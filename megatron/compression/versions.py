"""Which versions are required, in one place: setup.py and the start-up check read it.

Ranges are what has been run: docs/versions.md has the table, scripts/test_versions.sh runs a
combination. constraints.txt has the versions of every number in docs/results. Replaced symbols are
checked one by one where they are replaced (``patches``).
"""

MEGATRON_CORE_SERIES = "0.19"
MEGATRON_CORE_AT_RISK = "MEGATRON_COMPRESSION_MEGATRON_CORE"
"""Environment variable: another series of megatron-core, such as 0.20, that a run may have
untested."""

REQUIRED = [
    "megatron-core>=0.19,<0.20",
    "torch>=2.10,<2.16",
    "triton>=3.6,<3.10",  # torch's wheels name the exact one
]

EXTRAS = {
    "plots": ["matplotlib"],
    "tokenizers": ["sentencepiece", "transformers"],
    "huggingface": ["safetensors", "transformers"],
    # For scripts/accuracy/pretrained.py, which fetches the weights itself.
    "pretrained": ["gguf", "tokenizers"],
    # For GPUs: it brings Transformer Engine and packages that are compiled at installation.
    "bridge": ["megatron-bridge>=0.6,<0.7"],
    # Its torch part is compiled at installation: scripts/setup.sh --with-transformer-engine.
    "transformer-engine": ["transformer_engine[core-cu13,pytorch]>=2.20,<3"],
}
