"""Of a number that was measured under several settings, one setting is judged and the others are counted.

A setting is the combination of the columns in which result files differ: tokens, window, seed, rank and whatever else
`Store.table()` names. Blocks, checkpoints and metrics of different settings are never mixed in one test.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.columns import SETTINGS_SCHEMA

# What identifies a number besides its site and setting: a series over checkpoints, and the checkpoint.
_SERIES = (
    *("model", "stack", "corpus", "population", "metric", "gradient", "proxy", "variant", "bin", "control"),
    *("stage", "step", "revision"),
)
_CHECKPOINT = 3
# These differ between checkpoints of one setting, or choose which rows a result file has.
_NO_SETTING = ("weights", "proxy_from", "requested_proxy", "gradients", "controls")


@dataclass(frozen=True, kw_only=True)
class OneSetting:
    """A table with one setting for each series and one result file for each of its checkpoints."""

    table: pa.Table
    judged: Mapping[tuple[str, ...], set[tuple[tuple[str, Any], ...]]]
    """By model, corpus, metric and population: the settings that were judged, of the columns that differ."""
    left_out: Mapping[tuple[str, ...], set[str]]
    """By the same: keys of result files that were not."""

    def notes(self, models: tuple[str, ...], place: tuple[str, str, str]) -> list[str]:
        """What a verdict on these models says about settings; nothing where there was no choice."""
        metrics, population, corpus = place
        about = [(model, corpus, metric, population) for model in models for metric in metrics.split("+")]
        left_out = set.union(set(), *(self.left_out.get(one, set()) for one in about))
        judged = set.union(set(), *(self.judged.get(one, set()) for one in about))
        texts = sorted(", ".join(f"{name} {value}" for name, value in setting) for setting in judged)
        notes = []
        if left_out:
            which = f" (judged: {'; '.join(text for text in texts)})" if any(texts) else ""
            files = f"{len(left_out)} result file{'s' if len(left_out) > 1 else ''}"
            notes.append(f"{files} of the same checkpoints under other settings left out{which}")
        elif len(texts) > 1:
            notes.append(f"its models were measured under different settings: {'; '.join(texts)}")
        return notes


def one_setting(table: pa.Table) -> OneSetting:
    """For each series the setting with most checkpoints, for each checkpoint one result file of that setting.

    Settings with as many checkpoints: the one that covers more of the model's numbers on that text, then the latest
    version, most points, most batches. Result files of one checkpoint and setting: the latest version, most points,
    most batches, the first key.
    """
    names = [
        name
        for name in SETTINGS_SCHEMA.names
        if name in table.column_names and name not in _NO_SETTING and len(table[name].unique()) > 1
    ]
    plain = {name: table[name] for name in (*_SERIES, "key", "metric_version", "points")}
    plain |= {name: _decoded(table[name]) for name in names}
    plain["batches"] = pc.list_value_length(table["values"])  # pyright: ignore[reportAttributeAccessIssue]
    sums = pa.table(plain).group_by([*_SERIES, *names, "key"])
    sums = sums.aggregate([("points", "sum"), ("metric_version", "max"), ("batches", "sum")]).to_pylist()
    series: dict[tuple, dict[tuple, dict[tuple, list[tuple]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    covered: Counter[tuple] = Counter()
    for row in sums:
        identity = tuple(row[name] for name in _SERIES)
        setting = tuple((name, row[name]) for name in names)
        rank = tuple(-(row[name] or 0) for name in ("metric_version_max", "points_sum", "batches_sum"))
        series[identity[:-_CHECKPOINT]][setting][identity[-_CHECKPOINT:]].append((*rank, row["key"]))
        covered[row["model"], row["corpus"], setting] += 1
    judged: dict[tuple[str, ...], set[tuple]] = defaultdict(set)
    left_out: dict[tuple[str, ...], set[str]] = defaultdict(set)
    dropped: set[tuple] = set()
    for identity, settings in series.items():
        model, _, corpus, population, metric, *_ = identity

        def order(setting: tuple, settings: Any = settings, model: str = model, corpus: str = corpus) -> tuple:
            best = min(min(found) for found in settings[setting].values())
            return -len(settings[setting]), -covered[model, corpus, setting], best[:-1], repr(setting)

        chosen = min(settings, key=order)
        judged[model, corpus, metric, population].add(chosen)
        for setting, checkpoints in settings.items():
            for checkpoint, found in checkpoints.items():
                for *_, key in sorted(found)[1 if setting == chosen else 0 :]:
                    dropped.add((*identity, *checkpoint, key))
                    left_out[model, corpus, metric, population].add(key)
    if not dropped:
        return OneSetting(table=table, judged=judged, left_out=left_out)
    identities = zip(*(table[name].to_pylist() for name in (*_SERIES, "key")), strict=True)
    kept = table.filter(pa.array([one not in dropped for one in identities]))
    return OneSetting(table=kept, judged=judged, left_out=left_out)


def _decoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
