"""TAGC (arXiv 2504.05638): the largest gradients only, with error feedback.

compressor.py    the settings; ``--dp-compression tagc``
sync.py          one bucket's sum, exchange by exchange
layers.py        which values are compressed, and who owns them
parts.py         choosing, encoding and adding up: count sketches, or values with a bitmap
exchange.py      what is sent, counted
monitor.py       what sketches could not recover, for the log
"""
