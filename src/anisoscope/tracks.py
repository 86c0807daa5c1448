"""Tables of concepts, which of them are the same, and their life in training: everything that needs no model.

The sign of a direction has a meaning (codes are not negative), so cosines keep theirs.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from anisoscope.errors import SpecError
from anisoscope.records import site_order, without_nan
from anisoscope.revisions import training_order

# Under which concepts are attached to a unit: PREFIX, stack or nothing, /, site.
PREFIX = "concepts/"
_ENDING = ".directions"
# What the checkpoints of one training differ in.
_OF_CHECKPOINTS = ("model", "revision", "weights", "step", "proxy_from")
# What goes on as itself keeps half of its square at least, however far beyond chance less would be.
SAME = math.sqrt(0.5)
# Thresholds of cosines end before 1.
HIGHEST_LIMIT = 0.999


@dataclass(frozen=True, kw_only=True)
class Concepts:
    """A table of r concepts, by falling share of code energy; NaN for what was not given."""

    directions: np.ndarray
    """(r, d), of length one."""
    tokens: np.ndarray
    """(r, m): the points with the largest codes, strongest first; -1 where there are no more."""
    strengths: np.ndarray
    """(r, m): their codes."""
    sparsity: np.ndarray
    """Hoyer: 0 where all points have the same code, 1 where one point has all of it."""
    code_share: np.ndarray
    """Of Σz². They sum to 1."""
    variance_share: np.ndarray
    """Of the variance of the states: directions are not orthogonal, so these and the next two need not sum to 1."""
    gradient_share: np.ndarray
    """Σ(a·d)² / Σ‖a‖² over gradients a at the tokens; 1/d for gradients that know no direction."""
    coupled_share: np.ndarray
    """‖Gd‖² / ‖G‖² of G = Σ (a - ā)(h - h̄)ᵀ; about `variance_share` where gradients know nothing of the states."""
    stability: np.ndarray
    """Mean cosine with its partner in fits from other seeds to the same states. Noise has some too: see the next."""
    replication: np.ndarray
    """Mean cosine between its partners in fits to two halves that share no states."""

    def rows(self, contexts: Sequence[Sequence[str]] | None = None) -> list[dict[str, Any]]:
        """One row per concept for machines, NaN as None; `contexts` are texts of its tokens, if they were rendered."""
        columns = [item.name for item in fields(self) if item.name != "directions"]
        found = []
        for number in range(len(self.directions)):
            row = {name: _json(getattr(self, name)[number]) for name in columns}
            found.append({"concept": number, **row, **({"contexts": list(contexts[number])} if contexts else {})})
        return found

    def attach(self, prefix: str) -> dict[str, np.ndarray]:
        """Arrays for a unit's attachments."""
        return {f"{prefix}.{item.name}": getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_attachments(cls, attachments: Mapping[str, np.ndarray], prefix: str) -> "Concepts":
        """What `attach` made."""
        return cls(**{item.name: attachments[f"{prefix}.{item.name}"] for item in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class Matching:
    """Pairs of directions, one of each set, so that the sum of their cosines is largest."""

    first: np.ndarray
    second: np.ndarray
    cosines: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Tracks:
    """Concepts through checkpoints, by birth; a track has no gaps."""

    steps: np.ndarray
    """(c,)"""
    members: np.ndarray
    """(tracks, c): which direction of the checkpoint it is, -1 where it does not exist."""
    angles: np.ndarray
    """(tracks, c - 1): how far it turned in each interval, in radians; NaN where it did not exist at both ends."""

    @property
    def births(self) -> np.ndarray:
        """The first step it was seen at; the first of all may be late."""
        return self.steps[(self.members >= 0).argmax(1)]

    @property
    def deaths(self) -> np.ndarray:
        """The first step it was missing at; -1 where it lives on."""
        alive = self.members >= 0
        last = alive.shape[1] - 1 - alive[:, ::-1].argmax(1)
        return np.where(alive[:, -1], -1, self.steps[np.minimum(last + 1, len(self.steps) - 1)])

    def rows(self) -> list[dict[str, Any]]:
        """One row per track for machines."""
        births, deaths = self.births.tolist(), self.deaths.tolist()
        return [
            {
                "track": number,
                "birth": births[number],
                "death": None if deaths[number] < 0 else deaths[number],
                "members": self.members[number].tolist(),
                "angles": _json(self.angles[number]),
            }
            for number in range(len(self.members))
        ]

    def attach(self, prefix: str) -> dict[str, np.ndarray]:
        """Arrays for a unit's attachments."""
        return {f"{prefix}.{item.name}": getattr(self, item.name) for item in fields(self)}


def _json(values: np.ndarray | np.generic) -> Any:
    listed = values.tolist()
    return without_nan(tuple(listed) if isinstance(listed, list) else listed)


def render_context(
    texts: Sequence[str], windows: np.ndarray, positions: np.ndarray, token: int, *, radius: int = 6
) -> str:
    """The text around a token of a window, the token itself between ⟦ and ⟧; other windows do not show."""
    near = np.flatnonzero((windows == windows[token]) & (np.abs(positions - positions[token]) <= radius))
    ordered: list[int] = near[np.argsort(positions[near], kind="stable")].tolist()
    return "".join(f"⟦{texts[row]}⟧" if row == token else texts[row] for row in ordered)


def cosines_between(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Of all pairs; 0 for directions of length 0."""
    if one.shape[1] != other.shape[1]:
        raise SpecError(f"directions of one space are wanted; came {one.shape[1]} and {other.shape[1]} dimensions")
    lengths = np.linalg.norm(one, axis=1)[:, None] * np.linalg.norm(other, axis=1)
    return np.divide(one @ other.T, lengths, out=np.zeros_like(lengths), where=lengths > 0)


def match_directions(one: np.ndarray, other: np.ndarray, *, threshold: float | np.ndarray | None = None) -> Matching:
    """Hungarian matching on cosines; pairs below the threshold are none, and do not count in the sum.

    `threshold` is one cosine for all, or one for each direction of the first set.
    """
    from scipy.optimize import linear_sum_assignment

    cosines = cosines_between(one.astype(float), other.astype(float))
    limits = np.broadcast_to(-np.inf if threshold is None else np.asarray(threshold), len(cosines))
    allowed = cosines >= limits[:, None]
    first, second = linear_sum_assignment(np.where(allowed, cosines, 0.0), maximize=True)
    kept = allowed[first, second]
    return Matching(first=first[kept], second=second[kept], cosines=cosines[first, second][kept])


def stability_over(directions: np.ndarray, refits: Sequence[np.ndarray]) -> np.ndarray:
    """For each direction the mean cosine with its partner in each refit; 0 where it has none."""
    return np.mean([partner_cosines(directions, other) for other in refits], axis=0)


def replication_over(directions: np.ndarray, halves: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """For each direction the mean cosine between its partners in two halves; 0 where one is missing."""
    found = np.zeros((len(halves), len(directions)))
    for row, (one, other) in zip(found, halves, strict=True):
        left, right = (match_directions(directions, half) for half in (one, other))
        both, in_left, in_right = np.intersect1d(left.first, right.first, return_indices=True)
        cosines = cosines_between(one.astype(float), other.astype(float))
        row[both] = cosines[left.second[in_left], right.second[in_right]]
    return found.mean(0)


def partner_cosines(directions: np.ndarray, other: np.ndarray) -> np.ndarray:
    """For each direction the cosine with its partner in another set; 0 where it has none."""
    matching, found = match_directions(directions, other), np.zeros(len(directions))
    found[matching.first] = matching.cosines
    return found


def random_cosines(
    directions: np.ndarray, count: int, *, draws: int, seed: int, states: np.ndarray | None = None
) -> np.ndarray:
    """(draws, r): cosines with the partners in random sets, of any direction or of random mixtures of the states.

    Mixtures are the harder null: they share the large axes of the states, which any fit would find.
    """
    random = np.random.default_rng(seed)
    mixed = np.eye(directions.shape[1]) if states is None else states
    return np.stack(
        [partner_cosines(directions, random.standard_normal((count, len(mixed))) @ mixed) for _ in range(draws)]
    )


def match_threshold(cosines: np.ndarray, *, false_matches: float = 0.05) -> np.ndarray:
    """For each direction the cosine above which at most this share of its partners in a null lie.

    It is one of the M values of the null, the largest of them where M is small: a match beyond it has
    p ≤ max(false_matches, 1/(M + 1)). Never below 0.
    """
    if not 0 < false_matches < 1 or cosines.ndim != 2 or not cosines.size:
        raise SpecError(
            f"thresholds need a null of shape (draws, r) and a share inside (0, 1); came {cosines.shape} and "
            f"{false_matches}"
        )
    beyond = int(false_matches * (len(cosines) + 1) + 1e-9)
    return np.maximum(0.0, np.sort(cosines, axis=0)[-max(1, beyond)])


def follow_concepts(
    directions: Sequence[np.ndarray], steps: Sequence[int], *, threshold: float | Sequence[float | np.ndarray]
) -> Tracks:
    """Follow concepts through checkpoints: matched pairs go on, others end and begin.

    `threshold` is one cosine for all intervals, or one for each interval, or for each of its
    earlier directions (from `match_threshold`). Directions of length 0 are no concepts.
    """
    if len(directions) != len(steps) or not len(steps) or list(steps) != sorted(set(steps)):
        raise SpecError(f"one set of directions per rising step is wanted; came {len(directions)} for {list(steps)}")
    limits = list(threshold) if isinstance(threshold, Sequence) else [threshold] * (len(steps) - 1)
    if len(limits) != len(steps) - 1 or not all(
        np.all((np.asarray(limit) > 0) & (np.asarray(limit) < 1)) for limit in limits
    ):
        raise SpecError(f"thresholds inside (0, 1), one per interval, are wanted; came {limits}")
    members: list[list[int]] = []
    angles: list[list[float]] = []
    alive: dict[int, int] = {}
    for number, now in enumerate(directions):
        matching = None if number == 0 else match_directions(directions[number - 1], now, threshold=limits[number - 1])
        continued = {}
        if matching is not None:
            for first, second, cosine in zip(matching.first, matching.second, matching.cosines, strict=True):
                track = alive[int(first)]
                continued[int(second)] = track
                members[track][number] = int(second)
                angles[track][number - 1] = math.acos(min(1.0, float(cosine)))
        for newborn in np.flatnonzero(np.linalg.norm(now, axis=1) > 0).tolist():
            if newborn not in continued:
                continued[newborn] = len(members)
                members.append([-1] * number + [newborn] + [-1] * (len(steps) - number - 1))
                angles.append([math.nan] * (len(steps) - 1))
        alive = continued
    return Tracks(
        steps=np.array(steps),
        members=np.array(members, dtype=int).reshape(len(members), len(steps)),
        angles=np.array(angles, dtype=float).reshape(len(members), len(steps) - 1),
    )


@dataclass(frozen=True, kw_only=True)
class ConceptHistory:
    """The concepts of one site at the checkpoints of a training, in its order."""

    steps: tuple[int, ...]
    """Rising; places in the order where steps are not known."""
    tables: tuple[Concepts, ...]
    texts: tuple[Sequence[Sequence[Sequence[str]]], ...]
    """Of each checkpoint, for each concept: tokens and their contexts, strongest first."""
    tracks: Tracks

    def concepts(self, number: int = -1) -> list[dict[str, Any]]:
        """The table of a checkpoint, by default the last: one row per concept."""
        table, texts = self.tables[number], self.texts[number]
        return [
            {
                "concept": concept,
                **self._shares(number, concept),
                "sparsity": _json(table.sparsity[concept]),
                "replication": _json(table.replication[concept]),
                "stability": _json(table.stability[concept]),
                "top_tokens": [token for token, _ in texts[concept]],
                "contexts": [context for _, context in texts[concept]],
            }
            for concept in range(len(table.directions))
        ]

    def lives(self) -> list[dict[str, Any]]:
        """One row per track: when it was born and died, and how far it turned from first to last, in degrees."""
        births, deaths = self.tracks.births.tolist(), self.tracks.deaths.tolist()
        found = []
        for number, members in enumerate(self.tracks.members):
            seen = np.flatnonzero(members >= 0)
            first, last = (self.tables[place].directions[members[place]].astype(float) for place in seen[[0, -1]])
            cosine = float(cosines_between(first[None], last[None])[0, 0])
            found.append(
                {
                    "track": number,
                    "birth": births[number],
                    "death": None if deaths[number] < 0 else deaths[number],
                    "checkpoints": len(seen),
                    "turned_degrees": math.degrees(math.acos(min(1.0, max(-1.0, cosine)))),
                    "top_tokens": [token for token, _ in self.texts[seen[-1]][members[seen[-1]]]],
                }
            )
        return found

    def rows(self) -> list[dict[str, Any]]:
        """One row per track and checkpoint at which it lives; `cosine` is with itself one checkpoint before."""
        found = []
        for place, step in enumerate(self.steps):
            for track in np.flatnonzero(self.tracks.members[:, place] >= 0).tolist():
                concept = int(self.tracks.members[track, place])
                angle = math.nan if place == 0 else float(self.tracks.angles[track, place - 1])
                tokens = [token for token, _ in self.texts[place][concept]]
                row = {"step": step, "track": track, "concept": concept, "cosine": without_nan(math.cos(angle))}
                found.append(row | self._shares(place, concept) | {"top_tokens": tokens})
        return found

    def _shares(self, place: int, concept: int) -> dict[str, Any]:
        table = self.tables[place]
        return {
            "share_of_energy": _json(table.gradient_share[concept]),
            "share_of_codes": _json(table.code_share[concept]),
        }


def read_history(
    checkpoints: Sequence[Mapping[str, np.ndarray]], steps: Sequence[int | None], prefix: str, *, seed: int = 0
) -> ConceptHistory:
    """What units have attached under a prefix, in the order of training.

    A match must keep half of the square and pass two nulls: the largest cosine with fits to shuffled states, which is
    attached, and 95 of 100 cosines with random directions. Only the first knows of axes that all states share.
    """
    tables = tuple(Concepts.from_attachments(one, prefix) for one in checkpoints)
    known = [step for step in steps if step is not None]
    rising = len(known) == len(steps) and known == sorted(set(known))
    places = tuple(known) if rising else tuple(range(len(steps)))
    limits = []
    for one, table, following in zip(checkpoints, tables, tables[1:], strict=False):
        anywhere = match_threshold(random_cosines(table.directions, len(following.directions), draws=199, seed=seed))
        limits.append(np.clip(np.maximum(anywhere, one[f"{prefix}.threshold"]), SAME, HIGHEST_LIMIT))
    return ConceptHistory(
        steps=places,
        tables=tables,
        texts=tuple(json.loads(one[f"{prefix}.texts"].tobytes().decode()) for one in checkpoints),
        tracks=follow_concepts([table.directions for table in tables], places, threshold=limits),
    )


@dataclass(frozen=True, kw_only=True)
class Attached:
    """What a unit has attached, and of which checkpoint it is."""

    model: str
    corpus: str
    stage: str | None
    step: int | None
    revision: str | None
    settings: Mapping[str, Any]
    """Of its Spec: what was measured otherwise is another story."""
    arrays: Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The concepts of a model at a site."""

    model: str
    corpus: str
    stack: str | None
    site: str
    revisions: tuple[str | None, ...]
    history: ConceptHistory

    def as_json(self) -> dict[str, Any]:
        """Everything: the last table, the tracks, and a row per track and checkpoint."""
        names = ("model", "corpus", "stack", "site")
        return {
            **{name: getattr(self, name) for name in names},
            "revisions": list(self.revisions),
            "concepts": self.history.concepts(),
            "tracks": self.history.lives(),
            "rows": self.history.rows(),
        }


def trace_concepts(units: Iterable[Attached], site: str = "*") -> Iterator[Traced]:
    """Every model and site (a glob) with concepts attached, its checkpoints in the order of training."""
    trainings: dict[tuple[str, str], list[Attached]] = {}
    for unit in units:
        rest = {name: value for name, value in unit.settings.items() if name not in _OF_CHECKPOINTS}
        trainings.setdefault((unit.model, json.dumps(rest, sort_keys=True, default=str)), []).append(unit)
    for checkpoints in trainings.values():
        checkpoints.sort(key=lambda one: training_order(one.stage, one.step, one.revision))
        names = {name for one in checkpoints for name in one.arrays}
        prefixes = [name.removesuffix(_ENDING) for name in names if name.startswith(PREFIX) and name.endswith(_ENDING)]
        places = [(*prefix.removeprefix(PREFIX).partition("/")[::2], prefix) for prefix in prefixes]
        for stack, place, prefix in sorted(places, key=lambda one: (one[0], site_order(one[1]))):
            having = [one for one in checkpoints if f"{prefix}{_ENDING}" in one.arrays]
            if fnmatchcase(place, site):
                yield Traced(
                    model=having[0].model,
                    corpus=having[0].corpus,
                    stack=stack or None,
                    site=place,
                    revisions=tuple(one.revision for one in having),
                    history=read_history([one.arrays for one in having], [one.step for one in having], prefix),
                )
