"""The axes by name, and what a kernel depends on that changes along one. Needs no torch."""

from collections.abc import Mapping

AXES: Mapping[str, str] = {
    "repeat": "nothing that was given",
    "batch": "the number of sequences in the batch",
    "order": "the order of sequences in the batch",
    "neighbours": "the values of other sequences",
    "lengths": "the lengths of other sequences",
    "padding": "side and amount of padding",
    "heads": "the number of heads in the call",
    "rows": "the number of queries in the call",
    "longer": "later tokens that no row sees",
    "chunks": "how a prefill is cut into chunks",
    "decode": "whether a row is decoded or prefilled",
    "paged": "whether keys and values come from pages",
    "mask": "whether the mask is a flag or a tensor",
    "strides": "the layout in memory",
    "threads": "the number of threads",
    "graph": "whether it runs in a CUDA graph",
    "compiled": "whether it is compiled",
    "tiles": "its tiles and splits of the keys",
    "beyond": "what lies beyond its inputs in memory",
    "hidden": "keys that a mask hides",
    "hidden-nan": "keys that a mask hides, where these hold NaN",
    "unwritten": "what the memory of its output held before",
}
ASKED = ("compiled",)  # only where they are asked for by name
