"""Qwen2.5, Qwen3 and Llama 3: the models' numbers as Megatron flags, and their Hugging Face
weights."""
