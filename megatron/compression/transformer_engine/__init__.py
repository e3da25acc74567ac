"""Transformer Engine's tensor-parallel layers: their collectives go through our sites, all else is
theirs."""
