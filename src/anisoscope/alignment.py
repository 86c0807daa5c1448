"""Gradients against tangent proxies at every site: a probe in, rows out.

The proxy is fitted on one half of the probe's documents and tested on the gradients of the other. Rows are told apart
by their columns:

    gradient  `virtual` (coupled), `activation` (uncoupled), `embedding` (rows of the embedding), `linear` (of a module)
    proxy     `pca`, `seminmf`, `svd`, `local_pca`
    variant   `mean=in` or `mean=out` (the direction of the states' mean projected out of the proxy);
              `fit=untrained`, `fit=rolling`, `fit=frozen` where the proxy is one of earlier checkpoints (past.py);
              `split=types` where the proxy saw other token types than those it is tested on
    bin       of token frequency, rarest first, at equal token mass
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.cloud import select_members, typical_limit
from anisoscope.errors import SpecError
from anisoscope.gradients import ProbeGradients
from anisoscope.held import (
    WITH_MEAN,
    WITHOUT_MEAN,
    Candidate,
    Held,
    Place,
    enrichment_rows,
)
from anisoscope.holding import hold_against
from anisoscope.kernels.gram import limit_on, norms_of_each
from anisoscope.kernels.queues import few_threads
from anisoscope.metrics import Metric, all_metrics
from anisoscope.past import Past, sketch
from anisoscope.probed import Probed, ProbeRow
from anisoscope.records import Site
from anisoscope.scratch import return_free_memory
from anisoscope.tangent.energies import uncoupled_alignments
from anisoscope.tangent.means import without_mean
from anisoscope.tangent.proxies import Proxy, fit_each
from anisoscope.tangent.ranks import rank_within

VIEWS = ("enrichment", "removal", "trend", "turn")
GRADIENTS = ("virtual", "activation")
PROXIES = ("pca", "seminmf")
# Where the rows of the input embedding are states, and what those of the output embedding are multiplied with.
EMBEDDED = ("embed", "final_norm")
# Numbers of states whose places are looked at together: as many as caches hold, or as a GPU is busy with.
FITTED_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}


@dataclass(frozen=True, kw_only=True, eq=False)
class Aligned:
    """Rows, and what later checkpoints need of the proxies."""

    rows: list[ProbeRow]
    attachments: dict[str, np.ndarray]


def align(probed: Probed, names: Collection[str], past: Past | None = None) -> Aligned:
    """Every metric of alignment among `names`, at every site, for each gradient, proxy, population and variant.

    With a `past`, also against proxies of earlier checkpoints; only against them where the Spec names them.
    """
    found = {item.name: item for item in all_metrics().values() if item.needs in VIEWS and item.name in names}
    if not found:
        return Aligned(rows=[], attachments={})
    # Captured before, since others use it too.
    _, device = probed.proxy_states, probed.gradients.tokens.ids.device
    # Thousands of small operations, and autograd would be told of each.
    with few_threads(device), torch.inference_mode():
        return _align(probed, found, past)


def _align(probed: Probed, found: Mapping[str, Metric], past: Past | None) -> Aligned:
    aligned, device = Aligned(rows=[], attachments={}), probed.gradients.tokens.ids.device
    analysis, own = _Analysis(probed, found), probed.spec.proxy_from is None
    usual = dict.fromkeys(name for item in found.values() for name in item.populations)
    for places in analysis.places(probed.spec.populations or tuple(usual)):
        # The states that are fitted are gone before those that are tested come.
        fits = analysis.fit(places)
        return_free_memory(device)
        held = analysis.hold(places)
        if own:
            aligned.rows.extend(analysis.at(held, fits))
            aligned.attachments.update(sketch([(place.site, place.population) for place in places], fits))
        if past is not None:
            aligned.rows.extend(analysis.against_past(held, fits, past))
        # Before the next ones are read.
        del places, held, fits
        return_free_memory(device)
    if own:
        aligned.rows.extend(analysis.of_modules())
    return aligned


def in_both_ways(places: Sequence[Sequence[Candidate]]) -> list[list[Candidate]]:
    """The proxies of each place, with the direction of the states' mean in them and projected out."""
    rid = iter(without_mean([proxy for mine in places for _, proxy, _ in mine]))
    return [
        [
            one
            for name, proxy, variant in mine
            for one in ((name, proxy, WITH_MEAN + variant), (name, next(rid), WITHOUT_MEAN + variant))
        ]
        for mine in places
    ]


def _named(fits: Sequence[Mapping[str, Proxy]], variant: str = "") -> list[list[Candidate]]:
    return [[(name, proxy, variant) for name, proxy in proxies.items()] for proxies in fits]


class _Analysis:
    """One probe, and which numbers of it are wanted."""

    def __init__(self, probed: Probed, metrics: Mapping[str, Metric]) -> None:
        spec = probed.spec
        self.probed, self.metrics, self.seed = probed, metrics, spec.seed
        asked = spec.gradients or GRADIENTS
        self.gradients = [name for name in asked if name in GRADIENTS]
        self.linears = [name.partition(":")[2] for name in asked if name.startswith("linear:")]
        self.embedding = "embedding" in asked
        if self.embedding and not any(site.name in EMBEDDED for site in probed.sites):
            raise SpecError(f"gradients of the embedding are held against states at {' or '.join(EMBEDDED)}: add one")
        self.type_disjoint, self.shuffled = (name in spec.controls for name in ("type_disjoint", "shuffled_targets"))
        self.proxies = tuple(dict.fromkeys((spec.proxy, *PROXIES)))
        shown = probed.gradients.tokens
        self.tokens = {"fit": probed.fit_tokens(shown.ids.device), "test": shown}
        self.members: dict[tuple[str, str], Bool[Tensor, " n"]] = {}

    def places(self, populations: Sequence[str]) -> Iterator[list[Place]]:
        """Some of one width at a time: a GPU hardly needs longer for many small ones than for one."""
        some: list[tuple[Site, str]] = []
        states, elements = self.probed.proxy_states, 0
        most = limit_on(FITTED_ELEMENTS, self.tokens["test"].ids)
        for site, population in itertools.product(self.probed.sites, populations):
            width = states.width(site)
            full = elements + states.rows * width > most
            if some and (full or width != states.width(some[0][0])):
                yield self._places_of(some)
                some, elements = [], 0
            some.append((site, population))
            elements += states.rows * width
        if some:
            yield self._places_of(some)

    def _places_of(self, some: Sequence[tuple[Site, str]]) -> list[Place]:
        fit, test = self.probed.proxy_states, self.probed.gradients.sites
        populations = [population for _, population in some]
        fitting = self._keep("fit", (fit[site] for site, _ in some), populations)
        testing = self._keep("test", (test[site].values for site, _ in some), populations)
        # Not by each mask, which a GPU would have to count by itself.
        kept = fitting.nonzero()[:, 1].split(fitting.sum(1).tolist())
        return [
            Place(
                site=site,
                population=population,
                read_fitted=partial(fit.__getitem__, site),
                read_here=partial(test.__getitem__, site),
                keep=keep,
                fit_rows=rows,
            )
            for (site, population), rows, keep in zip(some, kept, testing.unbind(), strict=True)
        ]

    def _keep(
        self, half: str, states: Iterable[Float[Tensor, "n d"]], populations: Sequence[str]
    ) -> Bool[Tensor, "s n"]:
        """Which tokens `select_population` selects; what does not depend on the states is selected once."""
        typical = [number for number, population in enumerate(populations) if population == "typical"]
        keep = torch.stack([self._members(half, "content" if one == "typical" else one) for one in populations])
        if typical:
            norms = norms_of_each(list(itertools.compress(states, (one == "typical" for one in populations))))
            keep[typical] &= norms <= typical_limit(norms, self.probed.spec.typical_k)[:, None]
        return keep

    def _members(self, half: str, population: str) -> Bool[Tensor, " n"]:
        if (half, population) not in self.members:
            tokens = self.tokens[half]
            self.members[half, population] = torch.zeros_like(tokens.special)
            self.members[half, population][select_members(population, tokens, seed=self.probed.spec.seed)] = True
        return self.members[half, population]

    def hold(self, places: Sequence[Place]) -> Held:
        return Held(self.probed, self.metrics, places, self.gradients)

    def _shuffled(self, places: Sequence[Place]) -> Held:
        """The same places with the gradients of shuffled targets."""
        gradients = self.probed.shuffled_gradients.sites
        return self.hold([replace(place, read_here=partial(gradients.__getitem__, place.site)) for place in places])

    def fit(self, places: Sequence[Place]) -> list[dict[str, Proxy]]:
        """The proxies of each that are one space for all tokens."""
        return self._fit([place.fitted for place in places])

    def _fit(self, clouds: Sequence[Float[Tensor, "_ d"]]) -> list[dict[str, Proxy]]:
        methods = [name for name in self.proxies if name != "local_pca"]
        asked = self.probed.spec.rank
        ranks = [rank_within(asked, cloud.shape[1]) for cloud in clouds]
        each = [[cloud] for cloud in clouds]
        fits = fit_each(each, methods=methods, ranks=ranks, seed=self.seed)
        for proxies, rank in zip(fits, ranks, strict=True):
            if rank != asked:
                note = f"rank {rank}, half of the coordinates; {asked} was asked for"
                proxies |= {name: replace(one, notes=(*one.notes, note)) for name, one in proxies.items()}
        return fits

    def at(self, held: Held, fits: Sequence[Mapping[str, Proxy]]) -> Iterator[ProbeRow]:
        """Everything of some places, with the proxies of this checkpoint."""
        shuffled = self._shuffled(held.places) if self.shuffled else None
        every = hold_against(held, in_both_ways(_named(fits)), own=True, shuffled=shuffled)
        for at, (place, rows) in enumerate(zip(held.places, every, strict=True)):
            yield from rows
            if "local_pca" in self.proxies:
                yield from held.local(at)
            if self.type_disjoint:
                yield from self._type_disjoint(place)

    def against_past(self, held: Held, fits: Sequence[Mapping[str, Proxy]], past: Past) -> Iterator[ProbeRow]:
        """Energies in the proxies of earlier checkpoints, and how far this one's proxy is from them."""
        every: list[list[Candidate]] = []
        for at, (place, proxies) in enumerate(zip(held.places, fits, strict=True)):
            earlier = []
            for name in PROXIES:
                rank = proxies["pca"].rank
                for fit, before in past.proxies(place.site, place.population, name, rank, place.fitted):
                    earlier.append((name, before, f";fit={fit}"))
                    yield from held.turn(at, name, before, proxies[name], fit)
            every.append(earlier)
        yield from itertools.chain.from_iterable(hold_against(held, in_both_ways(every)))

    def _type_disjoint(self, place: Place) -> Iterator[ProbeRow]:
        """Half of the token types to fit on, the other half to test on."""
        first = (
            torch.rand(len(self.probed.probe.log_frequency), generator=torch.Generator().manual_seed(self.seed)) < 0.5
        )
        first = first.to(place.keep.device)
        fit_rows = place.fit_rows[first[self.tokens["fit"].ids[place.fit_rows]]]
        other = replace(place, fit_rows=fit_rows, keep=place.keep & ~first[self.tokens["test"].ids])
        candidates = in_both_ways(_named(self.fit([other]), ";split=types"))
        yield from hold_against(self.hold([other]), candidates)[0]

    def of_modules(self) -> Iterator[ProbeRow]:
        """Gradients of linear modules and of embedding rows, where they are asked for; the proxy is of their inputs."""
        if not self.linears and not self.embedding:
            return
        probed = self.probed
        test = probed.gradients_of("test", linears=self.linears, embedding=self.embedding)
        fit = probed.gradients_of("fit", linears=self.linears) if self.linears else test
        for path in test.linears:
            yield from self._of_module(path, fit, test)
        if test.embedding is not None:
            yield from self._embedding(test.embedding.read, test.embedding.types, EMBEDDED[0])
            if test.embedding.predicted is not None:
                yield from self._embedding(test.embedding.predicted, test.embedding.types, EMBEDDED[1])

    def _of_module(self, path: str, fit: ProbeGradients, test: ProbeGradients) -> Iterator[ProbeRow]:
        place = Place(
            site=Site(name=path),
            population="all",
            read_fitted=lambda: fit.linears[path].values,
            read_here=lambda: test.linears[path],
            keep=torch.ones_like(test.tokens.special),
            fit_rows=torch.arange(len(fit.windows), device=fit.windows.device),
        )
        candidates = in_both_ways(_named(self.fit([place])))
        yield from hold_against(Held(self.probed, self.metrics, [place], ("linear",)), candidates)[0]

    def _embedding(self, rows: Float[Tensor, "v d"], types: Int[Tensor, " v"], name: str) -> Iterator[ProbeRow]:
        """Gradient rows of the input embedding against the states at `embed`, of the output one at `final_norm`."""
        for site in self.probed.sites:
            if site.name != name or self.probed.proxy_states.width(site) != rows.shape[1]:
                continue
            (candidates,) = in_both_ways(_named(self._fit([self.probed.proxy_states[site]])))
            candidates = [one for one in candidates if one[1].rank > 0]
            every = uncoupled_alignments(rows[None], [[proxy for _, proxy, _ in candidates]], seed=self.seed)[0]
            for (method, proxy, variant), found in zip(candidates, every, strict=True):
                columns = {"gradient": "embedding", "proxy": method, "rank": proxy.rank, "variant": variant}
                yield from enrichment_rows(
                    self.metrics, found, math.nan, site=site, population="types", points=len(types), columns=columns
                )
