"""Stands before the installed transformers on PYTHONPATH, whose import costs a process two seconds.

Megatron loads it for Hugging Face tokenizers only and goes without where it is absent.
"""

raise ModuleNotFoundError("this test run starts without transformers", name="transformers")
