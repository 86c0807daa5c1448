"""A probe in a model: the states of one half, states and gradients of the other, each computed once for every analysis.

Whatever is fitted is fitted on the fit half and tested on the test half, which share no document. All sites together
may not fit into memory: every look-up of a site reads its matrices anew, so hold on to them only while they are in use.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.capture import capture, windows_per_pass
from anisoscope.cloud import Tokens, select_population
from anisoscope.estimates import answer_once
from anisoscope.gauge import seed_for
from anisoscope.gradients import Coupled, Place, ProbeGradients, capture_gradients, read_for_loss, tokens_of
from anisoscope.metrics import Metric
from anisoscope.models import Model
from anisoscope.passes import PassSize
from anisoscope.probes import Probe
from anisoscope.records import Estimate, Site, Spec
from anisoscope.scratch import Matrices, return_free_memory
from anisoscope.text import Windows

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


class StoredPairs(Mapping[Any, Coupled]):
    """States and their gradients by place (a site or a linear module), read anew at each look-up."""

    def __init__(self, matrices: Matrices[tuple[Place, str]], kind: type[Site] | type[str]) -> None:
        self._matrices = matrices
        self._places = tuple(place for place, name in matrices if name == "values" and isinstance(place, kind))

    def __getitem__(self, place: Place) -> Coupled:
        values, gradients = (self._matrices[place, name] for name in ("values", "gradients"))
        return Coupled(values=values, gradients=gradients)

    def __iter__(self) -> Iterator[Place]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@dataclass(frozen=True, kw_only=True, eq=False)
class Probed:
    """What a model makes of a probe. Nothing is run before it is asked for."""

    model: Model
    probe: Probe
    sites: tuple[Site, ...]
    spec: Spec
    pass_size: PassSize = field(default_factory=PassSize)

    @cached_property
    def gradients(self) -> ProbeGradients:
        """States and gradients of the test half at every site."""
        return self.gradients_of("test", sites=self.sites)

    @cached_property
    def shuffled_gradients(self) -> ProbeGradients:
        """The same with targets shuffled among the tokens: what the model makes of any text of these tokens."""
        return self.gradients_of("test", sites=self.sites, shuffle=self.spec.seed)

    def gradients_of(self, half: str, *, sites: Sequence[Site] = (), **settings: Any) -> ProbeGradients:
        """States and gradients of a half of the probe, stored place by place; settings as of `capture_gradients`."""
        windows: Windows = getattr(self.probe, half)
        length = windows.token_ids.shape[1]
        stored: Matrices[tuple[Place, str]] = Matrices(windows.token_ids.size)

        def store(place: Place, part: slice, values: Tensor, gradients: Tensor) -> None:
            rows = slice(part.start * length, part.stop * length)
            stored.write((place, "values"), rows, values.flatten(0, 1))
            stored.write((place, "gradients"), rows, gradients.flatten(0, 1))

        seed = self.mask_seed(half)
        settings |= {"seed": seed, "batch_size": self.pass_size, "into": store}
        found = capture_gradients(self.model, windows, sites, **settings)
        return_free_memory(found.windows.device)
        return replace(found, sites=StoredPairs(stored, Site), linears=StoredPairs(stored, str))

    def mask_seed(self, half: str) -> int:
        """What positions are masked by, where the model predicts masked tokens."""
        return seed_for(self.spec.seed, ("fit", "test").index(half), 2)

    @cached_property
    def fit_states(self) -> Matrices[Site]:
        """States of the fit half at every site, as the model reads plain text."""
        return self._states(torch.from_numpy(self.probe.fit.token_ids))

    @cached_property
    def proxy_states(self) -> Matrices[Site]:
        """Those that tangent proxies are fitted on: read as for the loss, whose gradients they are held against.

        A masked model's gradients belong to text with masks: a proxy that never saw one leaves out where they lie.
        """
        if self.model.head == "causal":
            return self.fit_states
        return self._states(read_for_loss(self.model, self.probe.fit, self.mask_seed("fit"))[0])

    def _states(self, ids: Int[Tensor, "w t"]) -> Matrices[Site]:
        count, length = ids.shape
        stored: Matrices[Site] = Matrices(ids.numel())

        def run(part: slice) -> None:
            rows = slice(part.start * length, part.stop * length)

            def store(site: Site, state: Tensor) -> None:
                stored.write(site, rows, state.flatten(0, 1).float())

            capture(self.model, ids[part], self.sites, store)

        default = windows_per_pass(self.model, length, FORWARD_TOKENS)
        self.pass_size.run(run, stop=count, default=default, seq_len=length)
        return stored

    def fit_cloud(self, site: Site, population: str) -> tuple[Float[Tensor, "m d"], Int[Tensor, " m"]]:
        """States of the fit half at a site, of the tokens in a population, and the ids of these."""
        states = self.fit_states[site]
        return_free_memory(states.device)
        tokens = self.fit_tokens(states.device)
        index = self.members(population, states, tokens)
        return states[index], tokens.ids[index]

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
