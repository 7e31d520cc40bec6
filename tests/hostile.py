"""Names that try to be more than names, and judgements about them."""

from __future__ import annotations

from gate_rows import row
from hypothesis import strategies as st

from numdev.gate.findings import findings_of
from numdev.gate.judging import judge
from numdev.gate.rules import default_rules
from numdev.gate.verdict import Judgement
from numdev.report import DeviationRow, Finding

NAMES = (
    "<script>alert(1)</script>",
    "]]></failure><testcase/>&amp;&#0;",
    '" onclick="x',
    "a | b | c",
    "`code` **bold** [text](http://evil.example) ![x](y)",
    "http://evil.example www.evil.example me@evil.example @octocat :tada: $x^2$",
    "# heading",
    "1. list",
    "- [ ] task",
    "---",
    "| a |\n|---|\n| b |",
    "x\n::error::planted\n::add-mask::secret",
    "x\r\n##[error]planted",
    "::stop-commands::x",
    "a,line=7,title=b::c",
    "100%0A::error::planted",
    "\x1b[31mred\x1b[0m\x00\x07\x7f\x9b\ufffe\u202e\u2028",
    "\\",
    "<!-- ",
    "~~~",
    "emoji \U0001f600 and é",
)
"""XML, HTML, Markdown, workflow commands, terminals."""
names = st.one_of(st.sampled_from(NAMES), st.text(max_size=30))
STATES = {
    "sound": {},
    "exceeded": {"expected_ratio": 9.0},
    "suspected": {"suspicion": "the mask is ignored", "suspicion_cut": 20.0},
    "lacking": {"nonfinite": None, "nulls": {"nonfinite": "not counted"}},
    "failed": {"status": "failed", "reason": "it raised"},
    "skipped": {"status": "skipped", "reason": "needs CUDA"},
}


@st.composite
def rows(draw: st.DrawFn) -> list[DeviationRow]:
    """Up to four heads of up to four kernels, in any state, with hostile names wherever a name
    comes from elsewhere."""
    found = []
    for head in range(draw(st.integers(0, 4))):
        changes = dict(STATES[draw(st.sampled_from(sorted(STATES)))])
        for name in changes.keys() & {"suspicion", "reason"}:
            changes[name] = draw(names)
        changes |= {name: draw(names) for name in ("kernel", "case", "module")}
        options = draw(st.dictionaries(names, names, max_size=1))
        layer = draw(st.sampled_from([None, 3]))
        found.append(row(head, layer=layer, options=options, **changes))
    return found


def judged(found: list[DeviationRow]) -> tuple[Judgement, tuple[Finding, ...], tuple[str, ...]]:
    """What the gate makes of rows."""
    return judge(found, default_rules()), *findings_of(found, default_rules())
