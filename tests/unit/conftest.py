"""Megatron's modules are imported with the CPU stand-ins in place, as in every process of a run."""

from megatron import host

host.install()
