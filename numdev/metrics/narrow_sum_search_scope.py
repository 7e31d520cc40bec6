"""In which calls, and in which head, it is looked for whether gradients are summed in 16
bits over tiles (`numdev.operations.attention.explain.narrow_sums`): one statement for who
measures and who judges. No torch."""

from __future__ import annotations

# Of keys, over which dq is summed, or of queries, over which dk and dv are
TILES = (32, 64, 128)
FORMATS = ("bfloat16", "float16")
LEAST_TERMS = 192  # fewer are hardly more than one of the largest tiles
LEAST_ROWS = 32  # of a gradient: fewer elements tell of nothing
SAMPLED = "query rows are sampled"
UNPREDICTED = "nothing is predicted of it"
ELSEWHERE = "looked for in one kv head of each call"


def why_not_looked_for(tensor: str, fmt: str, q_len: int, kv_len: int) -> str | None:
    """Returns why a running sum in 16 bits is not looked for in a gradient of a call
    (`tensor`: dq, dk or dv; `fmt`: the call's format), as a clause; None where it is
    looked for."""
    terms, rows = (kv_len, q_len) if tensor == "dq" else (q_len, kv_len)
    of, among = ("keys", "queries") if tensor == "dq" else ("queries", "keys")
    if fmt not in FORMATS:
        return f"a sum in {fmt} is not looked for"
    if terms < LEAST_TERMS:
        return f"fewer than {LEAST_TERMS} {of} are hardly more than one tile"
    if rows < LEAST_ROWS:
        return f"fewer than {LEAST_ROWS} {among} tell of nothing"
    return None


def chosen_head(layer: int | None, call: int, count: int) -> int:
    """Returns the index, of `count` measured kv heads of a call (at least 1), of the one
    head in which a sum in 16 bits is looked for, since it costs some matrix products:
    `layer` + `call`, modulo `count`. A `layer` of None counts as 0."""
    return ((layer or 0) + call) % count
