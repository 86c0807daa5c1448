"""What a paper says and what it looked at: plain data, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PAPER_POPULATIONS = ("all", "typical")
"""The first is the papers'; the second shows what a few tokens do to it."""


@dataclass(frozen=True, kw_only=True)
class View:
    """One way in which a claim is looked at: by whose control, over which part of a training."""

    name: str
    """Empty where there is one way only."""
    tests: tuple[str, ...]
    """Claims as `claims.judge` calls them; together they are one: all must hold."""
    has: tuple[str, ...] = ()
    """Only verdicts whose variant contains these."""
    lacks: str = "\0"
    """Only verdicts whose variant does not contain this."""
    remark: str = ""
    """What a reader of its verdict must know."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Numbers that are shown beside a claim; they decide nothing."""

    metric: str
    site: str
    """A site, or `last` for the last block."""
    population: str = "all"
    variant: str | None = None


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """One claim of a paper."""

    name: str
    predicts: str
    """What the paper says, in our words."""
    where: str
    """Where it says so, and what we know that from."""
    views: tuple[View, ...] = ()
    untested: str = ""
    """Why a view of it, or all of them, may have no verdict."""
    negated: bool = False
    """The tests state what the paper denies: it is reproduced where they fail."""
    existential: bool = False
    """One model is enough to show it, and no number of others speaks against it."""
    kinds: tuple[str, ...] = ("decoder", "encoder")
    """Models that the claim is about."""
    populations: tuple[str, ...] = PAPER_POPULATIONS
    readings: tuple[Reading, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Followed:
    """A model over its training."""

    model: str
    """A hub name, or a family of repositories with a `*`."""
    revisions: tuple[str, ...] = ()
    """As the paper names them; empty: `log_spaced` of those there are, or the model itself where there are none."""
    log_spaced: int = 12


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper: its claims, its models, and how it is measured at each size."""

    name: str
    title: str
    protocols: Mapping[str, str]
    """Variant -> protocol; the first is the default."""
    claims: tuple[Claimed, ...]
    models: tuple[str, ...]
    """Measured as they are published."""
    followed: tuple[Followed, ...]
    corpora: tuple[str, ...]
    kinds: tuple[str, ...]
    """Of the small models that stand in for its models."""
    asked: tuple[Mapping[str, Any], ...] = ({},)
    """One unit each for every checkpoint and corpus: what differs from the protocol's Spec."""
    asked_last: tuple[Mapping[str, Any], ...] = ()
    """The same, for the last checkpoint alone."""
    pocket: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Variant -> what is smaller at the sizes `pocket` and `small`."""
    drift: bool = False
    """Whether rows of the output embedding are followed from checkpoint to checkpoint."""
    follow: bool = False
    """Whether gradients are also held against tangent proxies of earlier checkpoints."""
    follows: tuple[str, ...] = ("decoder", "encoder")
    """Kinds of models that it follows over training; of the others the last checkpoint is enough."""
    judged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Column -> what is judged of rows that have it; the rest stays in the run."""
    choices: str = ""
    """What was chosen here about its checkpoints and corpora."""
    caution: str = ""
    """What a reader must know before any number."""

    def protocol(self, variant: str | None) -> str:
        """The protocol of a variant, None for the default."""
        return next(iter(self.protocols.values())) if variant is None else self.protocols[variant]
