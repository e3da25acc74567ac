"""Runs a script whose ranks each believe to be in the data centre of their number.

numbered_by_rank.py SCRIPT ARGUMENTS
"""

import os
import sys

from tests.distributed.server import run_script

run_script(sys.argv[1], [*sys.argv[2:], "--data-centre-rank", os.environ["RANK"]])
