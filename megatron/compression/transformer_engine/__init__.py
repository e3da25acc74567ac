"""Transformer Engine's tensor-parallel layers: their collectives through our sites, everything else theirs.

exchanges.py         what stands in for the three communication functions that TE's layers call
weight_gradients.py  weight gradients that run behind an exchange
hooks.py             puts both into a built model
"""
