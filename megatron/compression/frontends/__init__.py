"""The doors by which a training loop gets its session: each supplies a ``Host`` and calls the
session.

megatron_lm/   Megatron-LM's loop: the flags, ``enable``, entrypoints, what is checked at the start
own_loop.py    a loop over megatron-core without megatron.training
bridge.py      Megatron-Bridge

Of FSDP2 and of torch's DDP, which have no megatron-core, fsdp2/ and ddp/ are the doors.
"""
