"""What compression would bring on a cluster: iteration times by phase, predicted from a model's shape.

    shapes.py       Model, Layout: from Megatron's flags, or a model's name
    cluster.py      Constants, Link, Cluster: what was measured, or what the user says
    collectives.py  how long a message takes, compressed or not
    phases.py       predict(model, layout, cluster, config) -> Prediction
    memory.py       bytes a GPU needs
    search.py       layouts that fit, and the settings that are compared
    calibrate.py    measures the constants here: links, and by
    device_costs.py what a GPU and its host do

Everything but these two and the command line is pure. docs/cost_model.md has the formulas.
"""

from megatron.compression.advise.cluster import Cluster, Constants, Link
from megatron.compression.advise.phases import Prediction, predict
from megatron.compression.advise.shapes import Layout, Model
