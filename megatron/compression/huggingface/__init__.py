"""Qwen2.5, Qwen3 and Llama 3: the models' numbers as Megatron flags, and their Hugging Face weights.

models.py        the table of models, and a model as Megatron flags
flags.py         --qwen-model: the expansion of the command line
config.py        a model from and to Hugging Face's config.json
mapping.py       tensors: names, fused projections, tensor-parallel shards (pure functions)
files.py         safetensors files and their index
conversion.py    import into and export from the modules of a built model
"""
