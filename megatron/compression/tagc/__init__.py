"""TAGC (arXiv 2504.05638): the largest gradients only; a memory keeps the others for the next
iteration.

compressor.py    the settings; ``--dp-compression tagc``
sync.py          one bucket's sum, exchange by exchange
parts.py         which values are compressed, who owns them; choosing, encoding and adding up
"""
