"""The nouns: Spec, Site, Estimate, Record, Unit. Plain frozen data, no torch."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from anisoscope.validation import CONTROLS as CONTROLS
from anisoscope.validation import POPULATIONS as POPULATIONS
from anisoscope.validation import check_settings

# Raised whenever the meaning of an unchanged Spec changes, as where a default changes: an old result is not a new one.
KEY_VERSION = 2

# After the norm alone, after its gain, after its bias: the last is what the module returns.
FINAL_NORM_SITES = ("final_norm.normed", "final_norm.gained", "final_norm")
DEFAULT_METRICS = ("leading_variance", "mean_cosine", "isoscore", "participation_ratio", "twonn", "loss")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Everything that can change a number, and nothing that cannot (device, workers, paths)."""

    model: str
    revision: str | None = None
    weights: str | None = None
    """Commit hash of a hub model, or SHA-256 of the local files that define it; found before the key is made."""
    run: str | None = None
    """Name of a training; only for units measured live."""
    step: int | None = None
    corpus: str = "pydoc"
    corpus_hash: str | None = None
    tokens: int = 65536
    """How many tokens go through the model."""
    seq_len: int = 512
    special_tokens: bool = True
    batch_points: int = 4096
    dtype: str = "float32"
    seed: int = 0
    sites: tuple[str, ...] = ("embed", "block.*", "final_norm")
    populations: tuple[str, ...] = ()
    """Empty: each metric's own, as its declaration says."""
    typical_k: float = 6.0
    metrics: tuple[str | tuple[str, int], ...] = DEFAULT_METRICS
    """Estimators or families; after `walk.resolve`, pairs of name and version."""
    discard_fraction: float = 0.1
    gride_scales: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    neighbors: int = 20
    isoscore_zeta: float = 0.25
    blocks: tuple[str, ...] = ()
    """Paths of the block lists, where discovery is overruled by hand."""
    final_norm: tuple[str, ...] = ()
    # The fields below are read by the alignment and curvature metrics. They stand here already so that keys stay
    # comparable when those metrics arrive.
    rank: int | str = 16
    """Of tangent proxies, at most half of the coordinates; or what it goes by: `variance:0.9`, `participation_ratio`,
    `twonn`."""
    curvature_rank: int = 4
    proxy: str = "pca"
    proxy_from: str | None = None
    gradients: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    unknown_fields: tuple[tuple[str, Any], ...] = ()
    """Name and value of each field that a newer version wrote into a stored Spec; never set by hand."""

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, _plain(getattr(self, item.name)))
        settings = {item.name: getattr(self, item.name) for item in fields(self)}
        settings.pop("unknown_fields")
        check_settings(settings)

    def as_dict(self) -> dict[str, Any]:
        """Every field with its value, those of a newer version too: what a result file stores."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return values | dict(values.pop("unknown_fields"))

    def canonical(self) -> str:
        """The fields that differ from their defaults, as JSON: a field that is added later changes no key."""
        values = self.as_dict()
        for item in fields(self):
            if values.get(item.name, item.default) == item.default:
                values.pop(item.name, None)
            elif item.type is float:
                # 4 and 4.0 are the same setting.
                values[item.name] = float(values[item.name])
        return _as_json(values)

    @property
    def key(self) -> str:
        """Name of the result that this Spec produces: 20 hexadecimal digits."""
        return _hash(KEY_VERSION, self.canonical())

    @property
    def key_of_version_1(self) -> str:
        """The key that the first version of keys gave this Spec: a hash of all fields that there were."""
        names = _FIELDS_OF_VERSION_1.split()
        return key_of_version_1({name: value for name, value in self.as_dict().items() if name in names})

    def request(self, *, early: bool = False) -> str:
        """What was requested, whatever the weights: a checkpoint that was repaired answers for the broken one.

        `early`: without what is only known when model and text were read, as where that failed.
        """
        left_out = ("weights", *(_RESOLVED if early else ()))
        return Spec.from_dict({name: value for name, value in self.as_dict().items() if name not in left_out}).key

    @property
    def is_resolved(self) -> bool:
        """Whether text and metrics are pinned to hashes and versions."""
        return self.corpus_hash is not None and not any(isinstance(metric, str) for metric in self.metrics)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Spec":
        """The Spec that `as_dict` wrote, by this version or another.

        Nothing is validated: a stored Spec was measured, whatever this version accepts. Fields that are missing have
        their defaults, and fields that this version does not know are kept in `unknown_fields`.
        """
        names = {item.name: item.default for item in fields(cls) if item.name != "unknown_fields"}
        known = {name: _plain(values.get(name, default)) for name, default in names.items()}
        unknown = tuple((name, _plain(value)) for name, value in sorted(values.items()) if name not in names)
        spec = object.__new__(cls)
        for name, value in (known | {"model": values["model"], "unknown_fields": unknown}).items():
            object.__setattr__(spec, name, value)
        return spec


# What `walk.resolve` fills in or rewrites.
_RESOLVED = ("step", "corpus", "corpus_hash", "populations", "metrics")


_FIELDS_OF_VERSION_1 = (
    "model revision weights run step corpus corpus_hash tokens seq_len special_tokens batch_points dtype seed sites "
    "populations typical_k metrics discard_fraction gride_scales neighbors isoscore_zeta blocks final_norm rank "
    "curvature_rank proxy proxy_from gradients controls"
)


def key_of_version_1(spec: Mapping[str, Any]) -> str:
    """The key under which version 1 stored a Spec with these fields."""
    return _hash(1, _as_json(spec))


def _as_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _hash(version: int, text: str) -> str:
    return hashlib.sha256(f"{version}\n{text}".encode()).hexdigest()[:20]


def _plain(value: Any) -> Any:
    """Lists, as TOML and notebooks give them, as tuples, which are hashable; numbers of numpy as those of Python."""
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    return value.item() if isinstance(value, np.generic) else value


@dataclass(frozen=True, kw_only=True)
class Site:
    """A named place in a model where states are read."""

    name: str
    """`embed`, `block.0` ... `block.{L-1}`, `final_norm` and its stages, `output`."""
    stack: str | None = None
    """`encoder` or `decoder` in encoder-decoder models, else None."""
    depth: float | None = None
    """For blocks: the share of the blocks a state has passed, (k + 1) / L. None elsewhere."""


def site_order(name: str) -> tuple[int, int, str]:
    """Sort key that follows the way of a token through the model."""
    head, _, rest = name.partition(".")
    stage = {"embed": 0, "block": 1, "final_norm": 2, "output": 3}.get(head, 4)
    if name in FINAL_NORM_SITES:
        return stage, FINAL_NORM_SITES.index(name), ""
    number = re.match(r"\d+", rest)
    return stage, int(number.group()) if number else -1, rest


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """A file of a checkpoint: its name, size and, for weights, what is in it."""

    name: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One revision of a training run, and where in the training it stands, as far as that is known."""

    model: str
    """Hub name, local folder, or a family of either with a `*` that the revision stands for."""
    revision: str | None
    commit: str | None = None
    """What a hub revision pointed to when it was looked up."""
    stage: str | None = None
    """Part of a training in several parts: `stage1`, `stage2-ingredient3`."""
    step: int | None = None
    tokens: int | None = None
    """Tokens seen in training: from the name, the family's table or the user; never guessed."""
    files: tuple[WeightFile, ...] = ()
    """Known once it was inspected."""
    suspect: str | None = None
    """What is wrong with it, where verification found something."""

    @property
    def name(self) -> str:
        """How people call it."""
        return self.model if self.revision is None else f"{self.model}@{self.revision}"

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One estimator's answer over one or more batches of points."""

    value: float
    """Mean over batches; NaN, with a note, where the data forbid a number."""
    spread: float
    """Standard deviation over batches (n - 1); NaN where there is one batch."""
    values: tuple[float, ...]
    """One value per batch, in batch order."""
    null: float
    """What the declared null gives at this number of points and dimensions."""
    batches: int
    points: int
    """Points the estimator used, summed over batches."""
    dropped: int
    """Duplicate points it removed, summed over batches."""
    dim: int
    control: str | None = None
    p: float | None = None
    note: str | None = None

    @classmethod
    def from_values(cls, values: tuple[float, ...], **rest: Any) -> "Estimate":
        """Mean and spread over the batches that gave a number."""
        finite = [value for value in values if not math.isnan(value)]
        several = len(finite) > 1
        return cls(
            value=float(np.mean(finite)) if several else finite[0] if finite else math.nan,
            spread=float(np.std(finite, ddof=1)) if several else math.nan,
            values=values,
            batches=len(values),
            **rest,
        )


@dataclass(frozen=True, kw_only=True)
class Record:
    """One flat row of the table. Columns may be added at the end, never renamed or removed."""

    key: str
    model: str
    revision: str | None
    step: int | None
    tokens: int | None
    """Training tokens this checkpoint has seen, where known."""
    kind: str
    """`encoder`, `decoder` or `encoder-decoder`."""
    stack: str | None
    corpus: str
    population: str
    site: str
    depth: float | None
    metric: str
    metric_version: int
    value: float
    spread: float
    null: float
    batches: int
    points: int
    dropped: int
    excluded: int
    """Tokens the population left out, summed over batches: points + dropped + excluded = tokens measured. 0 where
    points are not tokens but types, bins or draws."""
    dim: int
    control: str | None = None
    control_value: float | None = None
    p: float | None = None
    gradient: str | None = None
    proxy: str | None = None
    rank: int | None = None
    bin: int | None = None
    variant: str | None = None
    values: tuple[float, ...] = ()
    note: str | None = None
    seconds: float = 0.0
    """Time all metrics of this site took together, over all batches."""
    stage: str | None = None
    """Part of a training in several parts, where the checkpoint's name states one."""
    suspect: str | None = None
    """Why the checkpoint may not be what its name says, where its files were found to be wrong."""
    run: str | None = None
    """Name of the training, where it was measured live."""
    low: float | None = None
    """Ends of a 95 % interval, where the estimator has one of its own."""
    high: float | None = None

    @classmethod
    def from_estimate(
        cls,
        answer: Estimate,
        *,
        spec: Spec,
        checkpoint: "Checkpoint",
        kind: str,
        site: "Site",
        population: str,
        metric: str,
        metric_version: int,
        key: str | None = None,
        **rest: Any,
    ) -> "Record":
        """The row of an estimate: what was asked, of which checkpoint, and what was found. `rest` are other columns.

        `key` is that of the Spec, where it is known already.
        """
        found = {name: getattr(answer, name) for name in _OF_ESTIMATE}
        given: dict[str, Any] = {
            "excluded": 0,
            **{name: getattr(spec, name) for name in ("model", "revision", "step", "corpus", "run")},
            **{name: getattr(checkpoint, name) for name in ("tokens", "stage", "suspect")},
        }
        return cls(
            key=key or spec.key,
            kind=kind,
            stack=site.stack,
            site=site.name,
            depth=site.depth,
            population=population,
            metric=metric,
            metric_version=metric_version,
            **given | found | rest,
        )

    def as_json(self) -> dict[str, Any]:
        """The row for machines: NaN becomes null."""
        return {item.name: without_nan(getattr(self, item.name)) for item in fields(self)}


_OF_ESTIMATE = ("value", "spread", "null", "batches", "points", "dropped", "dim", "values", "control", "p", "note")


def without_nan(value: Any) -> Any:
    """What JSON can hold: None in place of NaN and infinity, lists in place of tuples."""
    if isinstance(value, Mapping):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe_text(spec: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    """Which text the numbers of a unit are from: that of its states, and that of its gradients where it has some.

    Units of earlier versions counted the windows of the states alone.
    """
    text = provenance.get("text")
    if text is None:
        count = provenance.get("windows")
        text = {"states": {"corpus": spec.get("corpus"), "windows": count}} if count is not None else {}
    found = []
    length = f"of {spec.get('seq_len')} tokens"
    if states := text.get("states"):
        found.append(f"states: {states['windows']} windows {length}{_from(states)}")
    if probe := text.get("probe"):
        counts = " and ".join(f"{probe[half]['windows']} {half}" for half in ("fit", "test"))
        found.append(f"gradients: probe of {counts} windows {length}{_from(probe['test'])}")
    return "; ".join(found) or "no text"


def _from(text: Mapping[str, Any]) -> str:
    return f" from {text['corpus']}" + (f" ({text['documents']} documents)" if "documents" in text else "")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One Spec, where its numbers came from, and its Records: what a store keeps."""

    spec: Spec
    provenance: Mapping[str, Any]
    records: tuple[Record, ...]
    attachments: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Small arrays that a figure or a later unit needs."""

    @property
    def key(self) -> str:
        """The key of its Spec."""
        return self.spec.key

    def owners(self) -> list[dict[str, Any]]:
        """Who owns the leading axis, one entry per site: tokens, coordinates, and what first positions own together."""
        named = (name for name in self.attachments if name.startswith("owners/"))
        prefixes = (name.removesuffix(".shares") for name in named if name.endswith(".shares"))
        listed = (self._owners_at(prefix) for prefix in prefixes)
        # A store gives attachments back in an order of its own.
        return sorted(listed, key=lambda entry: (entry["stack"] or "", site_order(entry["site"])))

    def _owners_at(self, prefix: str) -> dict[str, Any]:
        part = {name.removeprefix(f"{prefix}."): values for name, values in self.attachments.items()}
        _, stack, site = prefix.split("/")
        texts = json.loads(part["texts"].tobytes().decode())
        tokens = zip(part["shares"].tolist(), part["positions"].tolist(), texts, strict=True)
        coordinates = zip(part["coordinate_shares"].tolist(), part["coordinates"].tolist(), strict=True)
        return {
            "site": site,
            "stack": stack or None,
            "first_position_share": float(part["first_position_share"][0]),
            "tokens": [{"share": s, "position": p, "text": text, "document": title} for s, p, (text, title) in tokens],
            "coordinates": [{"share": share, "coordinate": number} for share, number in coordinates],
        }
