"""A probe in a model: the states of one half, states and gradients of the other, each computed once for every analysis.

Whatever is fitted is fitted on the fit half and tested on the test half, which share no document.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.capture import capture, windows_per_pass
from anisoscope.cloud import Tokens, select_population
from anisoscope.estimates import answer_once
from anisoscope.gauge import seed_for
from anisoscope.gradients import ProbeGradients, capture_gradients, read_for_loss, tokens_of
from anisoscope.metrics import Metric
from anisoscope.models import Model
from anisoscope.probes import Probe
from anisoscope.records import Estimate, Site, Spec

FORWARD_TOKENS = 4096


class ProbeRow(NamedTuple):
    """One number, and the columns that tell it from others. A tuple: thousands are made beside a few passes."""

    site: Site
    population: str
    metric: Metric
    answer: Estimate
    excluded: int
    """Tokens that the population left out; 0 where points are not tokens."""
    columns: dict[str, Any]

    @classmethod
    def of(
        cls,
        metric: Metric,
        view: Any,
        *,
        site: Site,
        population: str,
        points: int,
        dim: int,
        excluded: int = 0,
        note: str | None = None,
        **columns: Any,
    ) -> "ProbeRow":
        """The metric of a view: NaN with the reason where the data forbid it, and with what else is to be noted."""
        answer = answer_once(metric, metric.function(view), points, dim, note)
        return cls(site, population, metric, answer, excluded, columns)

    def beside(self, columns: dict[str, Any]) -> "ProbeRow":
        """The same number in another row."""
        return ProbeRow(self.site, self.population, self.metric, self.answer, self.excluded, columns)


@dataclass(frozen=True, kw_only=True, eq=False)
class Probed:
    """What a model makes of a probe. Nothing is run before it is asked for."""

    model: Model
    probe: Probe
    sites: tuple[Site, ...]
    spec: Spec
    batch_size: int | None = None

    @cached_property
    def gradients(self) -> ProbeGradients:
        """States and gradients of the test half at every site."""
        return self._gradients()

    @cached_property
    def shuffled_gradients(self) -> ProbeGradients:
        """The same for targets that were dealt anew: what the model makes of any text of these tokens."""
        return self._gradients(shuffle=self.spec.seed)

    def _gradients(self, shuffle: int | None = None) -> ProbeGradients:
        settings = {"seed": self.mask_seed("test"), "batch_size": self.batch_size, "shuffle": shuffle}
        return capture_gradients(self.model, self.probe.test, self.sites, **settings)

    def mask_seed(self, half: str) -> int:
        """What positions are masked by, where the model predicts masked tokens."""
        return seed_for(self.spec.seed, ("fit", "test").index(half), 2)

    @cached_property
    def fit_states(self) -> dict[Site, Float[Tensor, "n d"]]:
        """States of the fit half at every site, as the model reads plain text."""
        return dict(self._states(torch.from_numpy(self.probe.fit.token_ids)))

    @cached_property
    def proxy_states(self) -> dict[Site, Float[Tensor, "n d"]]:
        """Those that tangent proxies are fitted on: read as for the loss, whose gradients they are held against.

        A masked model's gradients belong to text with masks: a proxy that never saw one leaves out where they lie.
        """
        if self.model.head == "causal":
            return self.fit_states
        return dict(self._states(read_for_loss(self.model, self.probe.fit, self.mask_seed("fit"))[0]))

    def _states(self, ids: Int[Tensor, "w t"]) -> Iterator[tuple[Site, Float[Tensor, "n d"]]]:
        size = self.batch_size or windows_per_pass(self.model, ids.shape[1], FORWARD_TOKENS)
        parts: dict[Site, list[Tensor]] = {site: [] for site in self.sites}
        for part in ids.split(size):
            for site, state in capture(self.model, part, self.sites).states.items():
                parts[site].append(state.flatten(0, 1).float())
        for site in self.sites:
            yield site, torch.cat(parts.pop(site))

    def fit_tokens(self, device: torch.device) -> Tokens:
        """What is known of the tokens of the fit half."""
        return tokens_of(self.probe.fit, device)

    def members(self, population: str, states: Float[Tensor, "n d"], tokens: Tokens) -> Int[Tensor, " m"]:
        """The rows that a population keeps."""
        return select_population(population, states, tokens, typical_k=self.spec.typical_k, seed=self.spec.seed)

    def log_frequency(self, types: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Of token ids, counted in other documents than those of the test half: log of the share of all tokens."""
        known = torch.from_numpy(self.probe.log_frequency).to(types.device)
        return known[types]
