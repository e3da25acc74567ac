"""Megatron's modules are imported with the CPU stand-ins in place, as everything that runs them does."""

from megatron import host

host.install()
