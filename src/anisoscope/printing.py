"""Units as terminal tables: profiles, final-norm stages, owners, counterfactuals."""

import math
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from anisoscope.records import Record, Unit, describe_text, site_order
from anisoscope.stages import NORM_METRICS, STAGES, StageChange, stage_changes

_BARS = "▁▂▃▄▅▆▇█"
# A table that is piped or saved is not cut to the 80 columns of a terminal nobody looks at.
_PIPED_WIDTH = 200
# With every column that tells rows apart.
_FULL_WIDTH = 400
# Characters a profile may take; deeper models show every second block, or every third.
_PROFILE_WIDTH = 40
_COLUMNS = ("embed", "lowest block", "highest block", "last block", "final_norm", "null", "points")


def open_console(piped_width: int = _PIPED_WIDTH) -> Console:
    """As wide as the terminal; wide enough for any table where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=piped_width)


def format_value(value: float) -> str:
    """Three significant digits; a dash where there is no number."""
    if math.isnan(value):
        return "–"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    return f"{value:.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    return min(4, max(0, 2 - math.floor(math.log10(abs(value))))) if value else 2


def format_spread(record: Record) -> str:
    """Value ± spread, the spread to the last digit of the value."""
    value, spread = record.value, record.spread
    if math.isnan(value) or math.isnan(spread):
        return format_value(value)
    if not 1e-3 <= abs(value) < 1e5:
        return f"{format_value(value)} ±{format_value(spread)}"
    return f"{value:.{_decimals(value)}f} ±{spread:.{_decimals(value)}f}"


def sparkline(values: Sequence[float]) -> str:
    """A profile in one line; blanks where there is no value. Bars start at zero: what is flat looks flat."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return ""
    low = min(0.0, *known)
    height = max(0.0, *known) - low or 1.0
    return "".join(" " if math.isnan(v) else _BARS[min(7, int(8 * (v - low) / height))] for v in values)


def print_unit(unit: Unit, *, full: bool = False) -> None:
    """A model's table: a line per estimator and population, with its profile over the blocks."""
    console = open_console(_FULL_WIDTH) if full else open_console()
    spec, records = unit.spec, unit.records
    kind = records[0].kind if records else ""
    console.print(Text(f"\n{spec.model}" + (f" @ {spec.revision}" if spec.revision else ""), style="bold"), Text(kind))
    console.print(
        Text(
            f"{describe_text(asdict(spec), unit.provenance)} · batches of at least {spec.batch_points} points · "
            f"{spec.dtype} · key {unit.key}"
        )
    )
    stacks = list(dict.fromkeys(record.stack for record in records if record.site != "output"))
    for stack in stacks:
        here = [record for record in records if record.stack == stack and record.site != "output"]
        of_gradients = [record for record in here if record.gradient is not None and record.proxy is not None]
        aligned = [record for record in of_gradients if _is_headline(record)]
        plain = [record for record in here if record.gradient is None or record.proxy is None]
        if full:
            console.print(_full_table(here))
        elif plain:
            console.print(_profile_table(plain, stack, console.width))
        if aligned and not full:
            console.print(_alignment_table(aligned))
        for table in _stage_tables(here, console.width):
            console.print(table)
    for record in records:
        if record.site == "output":
            tail = f" ({record.note})" if record.note else f" nats per token, {record.points} tokens"
            console.print(Text(f"{record.metric} {format_spread(record)}{tail}"))
    cost = unit.provenance.get("cost", {})
    if sum(cost.values()) > 0:
        shares = ", ".join(f"{part} {seconds / sum(cost.values()):.0%}" for part, seconds in cost.items())
        console.print(Text(f"{sum(cost.values()):.1f} s: {shares}"))
    for note in _notes(unit):
        console.print(Text(f"note: {note}"))


def _notes(unit: Unit) -> list[str]:
    """What is worth knowing about the unit, then what single records say, one line per sentence."""
    places: dict[str, list[str]] = {}
    for record in unit.records:
        if record.note and record.site != "output":
            places.setdefault(record.note, []).append(f"{record.metric} [{record.population}] at {record.site}")
    single = [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {note}" for note, names in places.items()
    ]
    return [*unit.provenance["notes"], *single]


def _profile_table(records: Sequence[Record], stack: str | None, width: int) -> Table:
    shown = _columns_for(width)
    table = Table(title=stack, title_justify="left", box=None, pad_edge=False)
    for name in ("estimator", "population", "over blocks"):
        table.add_column(name, no_wrap=True)
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    lines: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.metric not in NORM_METRICS:
            # What one metric says in several ways are several lines.
            named = " ".join(filter(None, (record.metric, record.proxy, record.variant)))
            lines.setdefault((named, record.population), []).append(record)
    for (named, population), rows in lines.items():
        by_site = {record.site: record for record in rows}
        blocks = sorted((row for row in rows if row.depth is not None), key=lambda row: site_order(row.site))
        known = [row for row in blocks if not math.isnan(row.value)] or blocks or rows
        high = max(known, key=lambda row: row.value)
        cells = {
            "embed": _cell(by_site.get("embed")),
            "lowest block": _cell(min(known, key=lambda row: row.value), named=True),
            "highest block": _cell(high, named=True),
            "last block": _cell(blocks[-1] if blocks else None),
            "final_norm": _cell(by_site.get("final_norm")),
            "null": format_value(high.null),
            "points": f"{high.batches} × {round(high.points / max(high.batches, 1))}",
        }
        stride = math.ceil(len(blocks) / _PROFILE_WIDTH) or 1
        profile = sparkline([row.value for row in blocks[::stride]])
        table.add_row(named, population, profile, *(cells[name] for name in shown))
    return table


def _is_headline(record: Record) -> bool:
    """Bins, shares and proxies of earlier checkpoints are many: they are in the store and under --full."""
    variant = record.variant or ""
    return record.bin is None and (";" not in variant or variant.endswith(";split=types"))


def _alignment_table(records: Sequence[Record]) -> Table:
    """Where gradients lie: a line per gradient, proxy, mean and population; each site a bar."""
    title = "Gradients in tangent proxies (means over sites; beyond chance: sites above every control, p ≤ .05)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    names = ("gradient", "proxy", "mean", "population", "excess over sites", "energy", "control", "excess")
    shuffled = ["shuffled"] if any(row.control == "shuffled" for row in records) else []
    for name in (*names, "beyond chance", "normal_ratio", *shuffled, "rank", "points"):
        table.add_column(name, justify="left" if name in names[:5] else "right", no_wrap=True)
    lines: dict[tuple, dict[str, list[Record]]] = {}
    for row in records:
        line = lines.setdefault((row.gradient, row.proxy, row.variant, row.population), {})
        line.setdefault(row.metric, []).append(row)
    for (gradient, proxy, variant, population), rows in sorted(lines.items(), key=lambda line: str(line[0])):
        excess = sorted(rows.get("tangent_excess", []), key=lambda row: site_order(row.site))
        energies = rows.get("tangent_energy", [])
        # The next directions have no p: what lies below them is not beyond chance, whatever others say.
        tested = [row.p <= 0.05 and row.value > 0 for row in excess if row.p is not None and not math.isnan(row.p)]
        # The trend with frequency is about types.
        one = (energies or excess or next(iter(rows.values())))[0]
        table.add_row(
            gradient,
            proxy,
            (variant or "").removeprefix("mean="),
            population,
            sparkline([row.value for row in excess]),
            *(
                format_value(_mean(values))
                for values in (
                    [row.value for row in energies],
                    [row.control_value for row in excess if row.control_value is not None],
                    [row.value for row in excess],
                )
            ),
            f"{sum(tested)}/{len(tested)}",
            format_value(_mean([row.value for row in rows.get("normal_ratio", [])])),
            *(
                format_value(_mean([row.control_value for row in energies if row.control_value is not None]))
                for _ in shuffled
            ),
            str(one.rank),
            str(one.points),
        )
    return table


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _stage_tables(records: Sequence[Record], width: int) -> list[Table]:
    """What the final norm does stage by stage, and the numbers of the norm itself; nothing where it was not asked."""
    tables, found = [], stage_changes(records)
    if found:
        table = Table(
            title="Through the final norm (pre: the last block)", title_justify="left", box=None, pad_edge=False
        )
        changes = [f"owed to {part}" for part in ("norm", "gain", "bias")] if width >= 170 else []
        for name in ("estimator", "population", *STAGES, *changes, "excluded"):
            table.add_column(name, justify="left" if name in ("estimator", "population") else "right", no_wrap=True)
        for one in found:
            values = (format_spread(one.stages[stage]) for stage in STAGES)
            owed = [_format_change(one, stage) for stage in STAGES[1:]]
            excluded = "/".join(str(one.stages[stage].excluded) for stage in STAGES)
            table.add_row(one.metric, one.population, *values, *owed[: len(changes)], excluded)
        tables.append(table)
    norms = [record for record in records if record.metric in NORM_METRICS]
    if norms:
        table = Table(box=None, pad_edge=False)
        for name in ("population", *NORM_METRICS):
            table.add_column(name, justify="left" if name == "population" else "right", no_wrap=True)
        for population in dict.fromkeys(record.population for record in norms):
            here = {record.metric: record for record in norms if record.population == population}
            table.add_row(population, *(_cell(here.get(name)) for name in NORM_METRICS))
        tables.append(table)
    return tables


def _format_change(one: StageChange, stage: str) -> str:
    """To the last digit of the value it leads to, with its part of the whole."""
    change, share = one.changes[stage], one.shares[stage]
    if math.isnan(change.value):
        return "–"
    digits = _decimals(one.stages["final"].value)
    spread = "" if math.isnan(change.spread) else f" ±{change.spread:.{digits}f}"
    # Adding zero takes the sign from a change that rounds to none.
    return f"{round(change.value, digits) + 0.0:+.{digits}f}{spread}" + (
        "" if math.isnan(share) else f" ({round(share, 2) + 0.0:.0%})"
    )


def print_counterfactuals(unit: Unit) -> None:
    """Isotropy after the final norm and the loss, a line per variant of the norm."""
    console = open_console()
    table = Table(title="If the final norm were another", title_justify="left", box=None, pad_edge=False)
    table.add_column("variant", no_wrap=True)
    columns = list(dict.fromkeys((record.metric, record.population) for record in unit.records))
    for metric, population in columns:
        table.add_column(metric if metric == "loss" else f"{metric}, {population}", justify="right", no_wrap=True)
    for variant in dict.fromkeys(record.variant for record in unit.records):
        here = {(record.metric, record.population): record for record in unit.records if record.variant == variant}
        table.add_row(Text(variant or ""), *(_cell(here.get(column)) for column in columns))
    console.print(table)
    for note in unit.provenance["notes"]:
        console.print(Text(f"note: {note}"))


def _columns_for(width: int) -> tuple[str, ...]:
    """What fits: a narrow terminal keeps the highest block and the null."""
    if width >= 170:
        return _COLUMNS
    if width >= 135:
        return tuple(name for name in _COLUMNS if name not in ("lowest block", "last block"))
    return ("highest block", "null")


def _cell(record: Record | None, *, named: bool = False) -> str:
    if record is None:
        return ""
    return f"{format_spread(record)} @{record.site.removeprefix('block.')}" if named else format_spread(record)


_LABELS, _TOLD_APART = ("site", "metric", "population"), ("stack", "gradient", "proxy", "variant", "bin")
_NUMBERS, _BESIDE = ("value", "spread", "null"), ("low", "high", "control", "control_value", "p")
_COUNTS = ("points", "dropped", "excluded")


def _full_table(records: Sequence[Record]) -> Table:
    """A row each; columns that only some metrics have where one of them is there."""
    columns = (*_LABELS, *_TOLD_APART, *_NUMBERS, *_BESIDE, *_COUNTS)
    names = [name for name in columns if any(getattr(row, name) is not None for row in records)]
    table = Table(box=None, pad_edge=False)
    for name in names:
        words = name in (*_LABELS, *_TOLD_APART, "control")
        table.add_column("estimator" if name == "metric" else name, justify="left" if words else "right")
    table.add_column("note")
    for row in sorted(records, key=lambda row: (row.metric, row.population, site_order(row.site))):
        table.add_row(*(_plain(getattr(row, name)) for name in names), Text(row.note or ""))
    return table


def _plain(value: object) -> str:
    return "" if value is None else format_value(value) if isinstance(value, float) else str(value)


def print_owners(unit: Unit) -> None:
    """Per site, the ten tokens and ten coordinates that own the leading axis."""
    console = open_console()
    console.print(Text("\nWho owns the leading axis (share of λ₁ in the token's batch, population all)", style="bold"))
    listed = unit.owners()
    if not listed:
        console.print("nobody: leading_variance was not measured")
    for site in listed:
        stack = f"{site['stack']} " if site["stack"] else ""
        share = site["first_position_share"]
        console.print(
            Text(f"{stack}{site['site']}: first positions of the windows own {share:.1%} together", style="bold")
        )
        tokens = ", ".join(
            f"{row['text']!r} {row['share']:.1%} (position {row['position']}, {row['document']})"
            for row in site["tokens"]
        )
        coordinates = ", ".join(f"{row['coordinate']} {row['share']:.1%}" for row in site["coordinates"])
        console.print(Text(f"  tokens       {tokens}"))
        console.print(Text(f"  coordinates  {coordinates}"))
