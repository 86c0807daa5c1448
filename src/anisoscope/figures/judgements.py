"""Verdicts as a table that can be printed."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from anisoscope.claims.verdicts import OUTCOMES, Verdict
from anisoscope.figures.captions import say
from anisoscope.figures.drawing import GREY, Chart, import_altair, inline, is_number, titled

HOLDS = OUTCOMES
# Drawn, not written: not every font has a tick and a cross.
_SYMBOLS = {
    "holds": "M-1,0L-.3,.7L1,-.8",
    "does not hold": "M-.7,-.7L.7,.7M-.7,.7L.7,-.7",
    "inconclusive": "M-.8,0L.8,0",
}
_COLOURS = {"holds": "#009E73", "does not hold": "#D55E00", "inconclusive": GREY}
_ROW = 20
_WIDEST = 40
_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("claim", "subject", "metric", "population", "corpus", "variant", "verdict")),
        *((name, pa.float64()) for name in ("effect", "low", "high", "p", "p_adjusted")),
        ("replicates", pa.int64()),
        ("text", pa.string()),
    ]
)


def verdicts_data(verdicts: Sequence[Verdict]) -> pa.Table:
    """What `judge` returned as a table: first what holds, then what does not, then what is inconclusive."""
    order = list(HOLDS.values())
    rows: list[dict[str, Any]] = [
        {
            **{name: getattr(one, name) for name in _SCHEMA.names if hasattr(one, name)},
            "verdict": HOLDS[one.holds],
            "low": one.interval[0],
            "high": one.interval[1],
        }
        for one in verdicts
    ]
    return pa.Table.from_pylist(sorted(rows, key=lambda row: order.index(row["verdict"])), schema=_SCHEMA)


def verdicts(found: Sequence[Verdict]) -> Chart:
    """Draw `verdicts_data`: a line for each verdict, with a symbol and a colour."""
    return draw_verdicts(verdicts_data(found))


def draw_verdicts(data: pa.Table) -> Chart:
    """Columns of text: verdict, claim, subject, metric, effect and p."""
    alt = import_altair()
    rows = data.to_pylist()
    drawn = []
    for place, row in enumerate(rows):
        about = f"{row['metric']} [{row['population']}]" + (f" {row['variant']}" if row["variant"] else "")
        effect = say(row["effect"]) if is_number(row["effect"]) else "–"
        p = say(row["p_adjusted"]) if is_number(row["p_adjusted"]) else "–"
        texts = {"claim": row["claim"], "subject": row["subject"], "about": about, "effect": effect, "p": p}
        short = {name: text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…" for name, text in texts.items()}
        drawn.append({**short, "verdict": row["verdict"], "place": place, "text": row["text"]})
    columns = {
        "verdict": "verdict",
        "claim": "claim",
        "subject": "about",
        "about": "metric",
        "effect": "effect",
        "p": "p",
    }
    # Letters of this size are about 5.6 wide.
    widths = {name: 5.9 * max(len(head), *(len(row[name]) for row in drawn)) + 14 for name, head in columns.items()}
    base = alt.Chart(inline(drawn))
    axis = alt.Y("place:O", axis=None, scale={"domain": list(range(len(drawn)))})
    shown = [alt.Tooltip("text:N", title="verdict")]
    domain = list(_SYMBOLS)
    colour = alt.Color("verdict:N", scale={"domain": domain, "range": list(_COLOURS.values())}, legend=None)
    shape = alt.Shape("verdict:N", scale={"domain": domain, "range": list(_SYMBOLS.values())}, legend=None)
    symbol = base.mark_point(size=70, strokeWidth=2.2, filled=False, opacity=1).encode(
        y=axis, color=colour, shape=shape, tooltip=shown
    )
    panels = [symbol.properties(width=22, height=_ROW * len(drawn))]
    for name, head in columns.items():
        cell = base.mark_text(align="left", x=0).encode(y=axis, text=f"{name}:N", tooltip=shown)
        cell = cell.encode(color=colour) if name == "verdict" else cell
        heading = alt.TitleParams(text=head, fontSize=11, anchor="start", offset=6)
        panels.append(cell.properties(width=widths[name], height=_ROW * len(drawn), title=heading))
    counts = [f"{sum(row['verdict'] == name for row in rows)} {name}" for name in domain]
    said = f"{' · '.join(counts)} · p is corrected within its family of claims"
    return titled(alt.hconcat(*panels, spacing=4), "Verdicts on claims", said, width=90)
