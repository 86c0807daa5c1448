"""Units, listings and layouts as terminal tables."""

import json
import math
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from anisoscope.claims import Correlation, Verdict
from anisoscope.errors import SpecError
from anisoscope.integrity import Verified
from anisoscope.records import Record, Unit, site_order
from anisoscope.stages import NORM_METRICS, STAGES, StageChange, stage_changes
from anisoscope.status import Overview, as_table

_BARS = "▁▂▃▄▅▆▇█"
# A table that is piped or saved is not cut to the 80 columns of a terminal nobody looks at.
_PIPED_WIDTH = 200
# Characters a profile may take; deeper models show every second block, or every third.
_PROFILE_WIDTH = 40
_COLUMNS = ("embed", "lowest block", "highest block", "last block", "final_norm", "null", "points")


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPED_WIDTH)


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
    console = _console()
    spec, records = unit.spec, unit.records
    kind = records[0].kind if records else ""
    console.print(Text(f"\n{spec.model}" + (f" @ {spec.revision}" if spec.revision else ""), style="bold"), Text(kind))
    console.print(
        Text(
            f"{spec.corpus} · {unit.provenance['windows']} windows of {spec.seq_len} tokens · batches of at least "
            f"{spec.batch_points} points · {spec.dtype} · key {unit.key}"
        )
    )
    stacks = list(dict.fromkeys(record.stack for record in records if record.site != "output"))
    for stack in stacks:
        here = [record for record in records if record.stack == stack and record.site != "output"]
        console.print(_full_table(here) if full else _profile_table(here, stack, console.width))
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
    asked = dict.fromkeys((record.metric, record.population) for record in records if record.metric not in NORM_METRICS)
    for metric, population in asked:
        rows = [record for record in records if (record.metric, record.population) == (metric, population)]
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
        table.add_row(metric, population, profile, *(cells[name] for name in shown))
    return table


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
    console = _console()
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


def _full_table(records: Sequence[Record]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("site", "estimator", "population", "value", "spread", "null", "points", "dropped", "excluded", "note"):
        table.add_column(name, justify="left" if name in ("site", "estimator", "population", "note") else "right")
    for row in sorted(records, key=lambda row: (row.metric, row.population, site_order(row.site))):
        numbers = (format_value(row.value), format_value(row.spread), format_value(row.null))
        counts = (str(row.points), str(row.dropped), str(row.excluded))
        table.add_row(row.site, row.metric, row.population, *numbers, *counts, Text(row.note or ""))
    return table


def print_owners(unit: Unit) -> None:
    """Per site, the ten tokens and ten coordinates that own the leading axis."""
    console = _console()
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


def listing(what: str, model: str | None = None, revisions: str | None = None) -> list[dict[str, Any]]:
    """The rows of `ls`."""
    if what == "checkpoints" and model is not None:
        from anisoscope.checkpoints import find_checkpoints

        return [
            {name: getattr(item, name) for name in ("model", "revision", "stage", "step", "tokens", "commit")}
            for item in find_checkpoints(model, revisions=revisions)
        ]
    if what == "metrics":
        from anisoscope.metrics import all_metrics

        return [
            {
                "family": item.family,
                "metric": item.name,
                "version": item.version,
                "null": item.null,
                "populations": ",".join(item.populations),
                "cite": item.cite,
                "what": item.summary,
            }
            for item in all_metrics().values()
        ]
    if what == "models":
        from anisoscope.layout import FAMILIES

        return [{"kind": kind, "families": ", ".join(names)} for kind, names in FAMILIES.items()]
    if what == "corpora":
        from anisoscope.corpora import CORPORA

        return [{"corpus": name, "what": text} for name, text in CORPORA.items()]
    if what == "protocols":
        from anisoscope.protocols import load_protocol, protocol_names

        papers = [load_protocol(name) for name in protocol_names()]
        return [{"protocol": p.name, "what": p.title, "models": len(p.models), "cite": p.cite} for p in papers]
    raise SpecError(f"ls lists metrics, models, corpora, protocols or checkpoints; came {what!r}")


def print_listing(what: str, rows: Sequence[dict[str, Any]]) -> None:
    """A listing as a table, and a sentence on what it does not say."""
    console = _console()
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(Text("" if value is None else str(value)) for value in row.values()))
    console.print(table)
    if what == "models":
        console.print(
            "\nThese families are tested. Any other transformers model works where its blocks and final norm are found "
            "and proven\nat load: `anisoscope doctor MODEL` tells. A hub name, a local folder or a .gguf file."
        )


def print_status(seen: Overview) -> None:
    """The units of a run and their states."""
    console = _console()
    console.print(as_table(seen.rows))
    console.print(seen.sentence())


def print_plan(verified: Verified, *, corpora: Sequence[str], as_json: bool) -> None:
    """What a sweep would measure, and how much it would read or download."""
    rows = [
        {
            "model": item.model,
            "revision": item.revision,
            "stage": item.stage,
            "step": item.step,
            "tokens": item.tokens,
            "commit": item.commit,
            "bytes": item.size,
            "suspect": item.suspect,
        }
        for item in verified.checkpoints
    ]
    if as_json:
        print(json.dumps(rows, ensure_ascii=False))
        return
    console = _console()
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="right" if name in ("step", "tokens", "bytes") else "left", overflow="fold")
    for row in rows:
        told = {**row, "bytes": format_bytes(row["bytes"]), "commit": (row["commit"] or "")[:12]}
        table.add_row(*(Text("" if value is None else str(value)) for value in told.values()))
    console.print(table)
    total = format_bytes(sum(row["bytes"] for row in rows))
    console.print(
        f"{len(rows)} checkpoints x {len(corpora)} corpora ({', '.join(corpora)}) = {len(rows) * len(corpora)} units, "
        f"{total} in all, {format_bytes(max(row['bytes'] for row in rows))} the largest"
    )
    if verified.findings:
        console.print(f"{len(verified.findings)} are suspicious: the sweep stops at them unless --no-verify is given")


def format_bytes(count: int) -> str:
    """A size as people say it."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """What holds, what does not, and what cannot be told; then each verdict as a sentence."""
    console = _console()
    if not verdicts:
        console.print("nothing measured here speaks to a claim: they need leading_variance or twonn at blocks")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("claim", "holds", "about", "estimator", "population", "effect", "interval", "corrected p"):
        table.add_column(name, justify="right" if name in ("effect", "interval", "corrected p") else "left")
    for one in verdicts:
        low, high = one.interval
        table.add_row(
            one.claim,
            {True: "yes", False: "no", None: "?"}[one.holds],
            Text(", ".join(part for part in (one.subject, one.variant) if part)),
            one.metric,
            one.population,
            format_value(one.effect),
            "–" if math.isnan(low) else f"{format_value(low)} … {format_value(high)}",
            format_value(one.p_adjusted),
        )
    console.print(table)
    console.print()
    for one in verdicts:
        console.print(Text(f"· {one.text}"))


def print_correlations(found: Sequence[Correlation]) -> None:
    """Correlations over checkpoints, of levels and of first differences."""
    if not found:
        return
    console = _console()
    console.print(Text(f"\n{found[0].measure} against {found[0].against}, over checkpoints", style="bold"))
    table = Table(box=None, pad_edge=False)
    for name in ("model", "corpus", "of", "kind", "value", "interval", "p", "checkpoints"):
        table.add_column(name, justify="right" if name in ("value", "interval", "p", "checkpoints") else "left")
    for one in found:
        low, high = one.interval
        interval = "–" if math.isnan(low) else f"{format_value(low)} … {format_value(high)}"
        numbers = (format_value(one.value), interval, format_value(one.p), str(one.checkpoints))
        table.add_row(Text(one.model), Text(one.corpus), one.of, one.kind, *numbers)
    console.print(table)
    console.print("Series that drift correlate by their levels whatever they are about: the differences have the p.")


def print_environment() -> None:
    """What is installed, and what each missing part would be good for."""
    import torch

    console = _console()
    table = Table(box=None, pad_edge=False)
    for name in ("what", "found", "for"):
        table.add_column(name)
    table.add_row("python", platform.python_version(), "")
    for package, purpose in (
        ("anisoscope", ""),
        ("torch", ""),
        ("transformers", ""),
        ("pyarrow", ""),
        ("accelerate", "--device-map and .gguf files: pip install 'anisoscope[gguf]'"),
        ("gguf", ".gguf files: pip install 'anisoscope[gguf]'"),
        ("datasets", "hf:DATASET corpora: pip install 'anisoscope[data]'"),
        ("ray", "sweep --engine ray: pip install 'anisoscope[ray]'"),
        ("submitit", "sweep --engine slurm: pip install 'anisoscope[slurm]'"),
    ):
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "not installed"
        table.add_row(package, found, Text(purpose))
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu only"]
    table.add_row("device", ", ".join(devices), f"{torch.get_num_threads()} threads")
    console.print(table)


def print_layout(model: Any) -> None:
    """The sites of a loaded model and what was proven about them."""
    console = _console()
    console.print(Text(f"{model.name}: {model.kind}, loss head: {model.head or 'none'}, weights {model.weights[:16]}"))
    for stack in model.layout.stacks:
        title = f"{stack.name} stack" if stack.name else None
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("site")
        table.add_column("is")
        table.add_row("embed", Text(f"input of {stack.blocks[0]}"))
        for number, path in enumerate(stack.blocks):
            call = stack.blocks[:number].count(path)
            table.add_row(f"block.{number}", Text(f"output of {path}" + (f", call {call + 1}" if call else "")))
        table.add_row(
            "final_norm",
            Text(f"output of {stack.final_norm}" if stack.final_norm else "none: the stack ends with its last block"),
        )
        console.print(table)
    for check in model.checks:
        console.print(Text(f"proven: {check}"))
    for note in model.notes:
        console.print(Text(f"note: {note}"))
