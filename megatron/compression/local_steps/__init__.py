"""Local steps: data centres train by themselves, and exchange differences of weights now and then.

Each data centre is a job of its own, with its own ranks, optimizer and checkpoints. After every
``--local-steps`` iterations a rank sends the difference of its shard of the fp32 masters to the
anchor, the weights that all data centres had in common last, to the ranks of its number elsewhere;
an outer optimizer moves the anchor by the mean of the differences (DiLoCo, arXiv 2311.08105; in
fragments and overlapped, Streaming DiLoCo, arXiv 2501.18512).

config.py           settings, and what they need of Megatron's arguments
schedule.py         which fragment starts and is applied after which iteration
outer_optimizer.py  anchor, momentum and residual memory: the mathematics, without communication
link.py             the connection to the same rank of the other data centres
masters.py          a rank's shard of the fp32 masters as one vector, and the copies of its parts
rounds.py           one run: rounds between iterations, the anchor in the weights, the start
checkpoint.py       anchor, momentum, residual memory and what is in flight, saved and restored
samples.py          which samples and which folders are this data centre's
"""
