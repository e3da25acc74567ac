"""A count sketch of sparse sums, which adds up without being decoded, in plain torch.

``sketch.py`` has the layout, the wire, encoding and decoding; ``selection.py`` chooses what is
sent. Sources: LHC (arXiv 2402.07529), TAGC (arXiv 2504.05638).
"""

from taco_kernels.count_sketch.selection import candidates, choose
from taco_kernels.count_sketch.sketch import (
    EXACT_LOAD,
    Decoded,
    SketchConfig,
    SketchLayout,
    combine,
    decode,
    encode,
    pack,
    row_exponents,
)
