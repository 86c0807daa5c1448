"""How often each control of gradient alignment calls something tangent: docs/control_rates.json and docs/methods.md.

Every case draws states and gradients whose truth is known. Where there is no signal, `holds` names the controls whose
hypothesis is true; the control that decides must then flag at most the nominal share. Where there is one, the share is
the power.

    python scripts/control_rates.py [--draws 500]        # some ten minutes on two cores
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anisoscope.claims.resampling import simes
from anisoscope.tangent.controls import energy_of, second_moment
from anisoscope.tangent.energies import (
    COUPLED_CONTROLS,
    UNCOUPLED_CONTROLS,
    Alignment,
    coupled_alignments,
    uncoupled_alignments,
)
from anisoscope.tangent.proxies import Proxy, fit_global
from anisoscope.tangent.windows import pair_each

ROOT = Path(__file__).parent.parent
STORED, PAGE = ROOT / "docs" / "control_rates.json", ROOT / "docs" / "methods.md"
BEGIN, END = "<!-- control rates: made by scripts/control_rates.py -->", "<!-- end of control rates -->"
DIM, RANK, DOCUMENTS, LENGTH, FITTED = 64, 8, 32, 16, 1024
TOKENS = DOCUMENTS * LENGTH
NOMINAL, DRAWS = 0.05, 59
MODELS, BLOCKS = 100, 6


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """States to fit on; states, gradients and gradients of shuffled targets to test, token by token."""

    fit: Tensor
    states: Tensor
    gradients: Tensor
    windows: Tensor
    documents: Tensor
    shuffled: Tensor | None = None


def noise(chance: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=chance)


def turned(chance: torch.Generator) -> Tensor:
    return torch.linalg.qr(noise(chance, DIM, DIM)).Q


def falling(power: float = 0.6) -> Tensor:
    """Standard deviations along principal axes."""
    return torch.arange(1, DIM + 1) ** -power


def smoothed(rows: Tensor, held: float = 0.95) -> Tensor:
    """First-order autoregression along each window, of the same variance."""
    shaped = rows.view(-1, LENGTH, DIM)
    found = [shaped[:, 0]]
    for place in range(1, LENGTH):
        found.append(held * found[-1] + math.sqrt(1 - held**2) * shaped[:, place])
    return torch.stack(found, 1).reshape(-1, DIM)


def drawn(fit: Tensor, states: Tensor, gradients: Tensor, shuffled: Tensor | None = None, each: int = 1) -> Drawn:
    """With so many windows of each document."""
    windows = torch.arange(len(states) // LENGTH).repeat_interleave(LENGTH)
    return Drawn(
        fit=fit, states=states, gradients=gradients, shuffled=shuffled, windows=windows, documents=windows // each
    )


# Coupled gradients


def independent(chance: torch.Generator) -> Drawn:
    axes, others = falling()[:, None] * turned(chance), falling()[:, None] * turned(chance)
    return drawn(
        noise(chance, FITTED, DIM) @ axes, noise(chance, TOKENS, DIM) @ axes, noise(chance, TOKENS, DIM) @ others
    )


def serial(chance: torch.Generator) -> Drawn:
    one = independent(chance)
    return replace(one, states=smoothed(one.states), gradients=smoothed(one.gradients))


def rogue(chance: torch.Generator) -> Drawn:
    """Six coordinates are large in the states and in the gradients."""
    large = torch.ones(DIM)
    large[torch.randperm(DIM, generator=chance)[:6]] = 8.0
    return drawn(*(noise(chance, count, DIM) * large for count in (FITTED, TOKENS, TOKENS)))


def common_mean(chance: torch.Generator) -> Drawn:
    one, mean = independent(chance), 3 * noise(chance, DIM)
    return replace(one, fit=one.fit + mean, states=one.states + mean, gradients=one.gradients + mean)


def of_documents(each: int, documents: int = DOCUMENTS) -> Callable[[torch.Generator], Drawn]:
    """Documents have means of their own in states and in gradients, which know nothing of each other.

    Those of states vary along fewer axes than tokens do.
    """

    def make(chance: torch.Generator) -> Drawn:
        axes, tokens = turned(chance), documents * each * LENGTH

        def means(count: int) -> Tensor:
            return noise(chance, count, DIM).repeat_interleave(tokens // count, 0)

        fit, states = (
            noise(chance, tokens, DIM) * falling() @ axes + means(count) * falling(1.2) @ axes
            for count in (4 * documents, documents)
        )
        return drawn(fit, states, noise(chance, tokens, DIM) + means(documents), each=each)

    return make


def masked(chance: torch.Generator) -> Drawn:
    """At the same positions of every window states lie apart, and gradients have something in common there."""
    one, away, taught = independent(chance), 3 * noise(chance, DIM) / math.sqrt(DIM), noise(chance, DIM)
    here = (torch.arange(LENGTH) % 7 == 3).repeat(DOCUMENTS)[:, None]
    fit = one.fit + (torch.arange(FITTED) % LENGTH % 7 == 3)[:, None] * away
    gradients = here * (taught + noise(chance, TOKENS, DIM)) + 0.1 * noise(chance, TOKENS, DIM)
    return replace(one, fit=fit, states=one.states + here * away, gradients=gradients)


def classes(chance: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """States of two kinds with covariances of their own, and which are of the second kind."""
    one, other = falling(1.2)[:, None] * 2 * turned(chance), falling()[:, None] * turned(chance)

    def rows(count: int) -> tuple[Tensor, Tensor]:
        second = torch.rand(count, 1, generator=chance) < 0.3
        return torch.where(second, noise(chance, count, DIM) @ one, noise(chance, count, DIM) @ other), second

    (fit, _), (states, second) = rows(FITTED), rows(TOKENS)
    return fit, states, second


def sizes_by_class(chance: torch.Generator) -> Drawn:
    """Directions of gradients know nothing of the states, and those of the second kind are three times as large."""
    fit, states, second = classes(chance)
    return drawn(fit, states, noise(chance, TOKENS, DIM) * torch.where(second, 3.0, 1.0))


def sizes_with_common_direction(chance: torch.Generator) -> Drawn:
    """The same, and all directions have a mean."""
    fit, states, second = classes(chance)
    away = noise(chance, DIM) / 2
    return drawn(fit, states, (noise(chance, TOKENS, DIM) + away) * torch.where(second, 3.0, 1.0))


def covariance_by_class(chance: torch.Generator) -> Drawn:
    """The same, and the large ones have a covariance of their own: their directions know of the states."""
    fit, states, second = classes(chance)
    rows, axes = noise(chance, TOKENS, DIM), falling()[:, None] * turned(chance)
    return drawn(fit, states, torch.where(second, 6 * rows @ axes, rows))


def follow(chance: torch.Generator, states: Tensor, axes: Tensor, to: Tensor | None = None) -> Tensor:
    """Gradients that follow the states along three axes, as strong as their noise."""
    along, to = states @ axes.T, noise(chance, 3, DIM) if to is None else to
    return noise(chance, len(states), DIM) + along / along.std() @ to / math.sqrt(3)


def coupled_signal(inside: bool) -> Callable[[torch.Generator], Drawn]:
    def make(chance: torch.Generator) -> Drawn:
        axes = turned(chance)
        fit, states = (noise(chance, count, DIM) * falling() @ axes for count in (FITTED, TOKENS))
        return drawn(fit, states, follow(chance, states, axes[1:4] if inside else axes[40:43]))

    return make


def signal_and_sizes(chance: torch.Generator) -> Drawn:
    """Gradients that follow the states along three axes, three times as large where these are of the second kind."""
    fit, states, second = classes(chance)
    axes = fit_global(fit, rank=4).basis.T[1:]
    return drawn(fit, states, follow(chance, states, axes) * torch.where(second, 3.0, 1.0))


def shuffled_alike(chance: torch.Generator) -> Drawn:
    """Gradients follow the states, and with shuffled targets they do so as much."""
    one = coupled_signal(True)(chance)
    axes, to = fit_global(one.fit, rank=4).basis.T[1:], noise(chance, 3, DIM)
    true, shuffled = (follow(chance, one.states, axes, to) for _ in range(2))
    return replace(one, gradients=true, shuffled=shuffled)


# Uncoupled gradients


def level(
    *,
    documents: bool = False,
    correlated: bool = False,
    large: bool = False,
    mean: bool = False,
    clouds: bool = False,
    heavy: bool = False,
    fitted: int = FITTED,
) -> Callable[[torch.Generator], Drawn]:
    """Gradients with equal energy in principal directions 1 to r and r + 1 to 2r of the states, and less outside."""

    def make(chance: torch.Generator) -> Drawn:
        shape = falling()[:, None] * turned(chance)
        if large:
            coordinates = torch.ones(DIM)
            coordinates[torch.randperm(DIM, generator=chance)[:3]] = 4.0
            shape = shape * coordinates
        centres = 2 * noise(chance, 4, DIM) @ shape if clouds else torch.zeros(4, DIM)
        centres = centres - centres.mean(0)
        covariance = shape.T @ shape + centres.T @ centres / 4
        axes = torch.linalg.eigh(covariance.double()).eigenvectors.flip(1).T.float()

        def rows(count: int) -> Tensor:
            return noise(chance, count, DIM) @ shape + centres[torch.randint(4, (count,), generator=chance)]

        found = noise(chance, TOKENS, DIM)
        if documents:
            found = found + noise(chance, DOCUMENTS, DIM).repeat_interleave(LENGTH, 0)
        if correlated:
            found = smoothed(found)
        if heavy:
            found = found * noise(chance, DOCUMENTS, 1).exp().repeat_interleave(LENGTH, 0)
        if mean:
            found = found + torch.where(torch.rand(DIM, generator=chance) < 0.5, -0.7, 0.7)
        energy = torch.where(torch.arange(DIM) < 2 * RANK, 1.0, 0.3)
        return drawn(rows(fitted), rows(TOKENS), found * energy @ axes)

    return make


def isotropic(chance: torch.Generator) -> Drawn:
    return replace(independent(chance), gradients=noise(chance, TOKENS, DIM))


def toward(inside: bool) -> Callable[[torch.Generator], Drawn]:
    """Gradients that are large along the tangent space, or along as many directions far outside it."""

    def make(chance: torch.Generator) -> Drawn:
        axes = turned(chance)
        fit, states = (noise(chance, count, DIM) * falling() @ axes for count in (FITTED, TOKENS))
        along = axes[:RANK] if inside else axes[40 : 40 + RANK]
        return drawn(fit, states, noise(chance, TOKENS, DIM) + 2 * noise(chance, TOKENS, RANK) @ along)

    return make


def toward_with_any_target(chance: torch.Generator) -> Drawn:
    """Gradients that are large along the tangent space, and as large there with shuffled targets."""
    one = toward(True)(chance)
    axes = fit_global(one.fit, rank=RANK).basis
    rows = [noise(chance, TOKENS, DIM) + 2 * noise(chance, TOKENS, RANK) @ axes.T for _ in range(2)]
    return replace(one, gradients=rows[0], shuffled=rows[1])


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is drawn, and which controls' hypotheses are true of it."""

    what: str
    make: Callable[[torch.Generator], Drawn]
    coupled: bool
    holds: tuple[str, ...] = ()
    signal: bool = False


_ALL, _NEXT = COUPLED_CONTROLS, ("next",)
CASES = (
    Case(what="gradients independent of states", make=independent, coupled=True, holds=_ALL),
    Case(what="serial correlation within windows", make=serial, coupled=True, holds=_ALL),
    Case(what="six large coordinates in both", make=rogue, coupled=True, holds=_ALL),
    Case(what="a common mean far from the origin", make=common_mean, coupled=True, holds=_ALL),
    *(
        Case(
            what=f"document means, windows of each: {each}",
            make=of_documents(each),
            coupled=True,
            holds=_ALL,
        )
        for each in (1, 2, 4)
    ),
    Case(what="the same, four windows of each of 8 documents", make=of_documents(4, 8), coupled=True, holds=_ALL),
    Case(what="something in common at masked positions", make=masked, coupled=True, holds=_ALL[:2]),
    Case(what="sizes by class of state", make=sizes_by_class, coupled=True, holds=_ALL[1:]),
    Case(what="sizes by class, a common direction", make=sizes_with_common_direction, coupled=True, holds=_ALL[1:2]),
    Case(what="sizes and covariances by class", make=covariance_by_class, coupled=True, holds=_ALL[2:]),
    Case(what="a signal that shuffled targets have too", make=shuffled_alike, coupled=True, holds=("shuffled",)),
    Case(what="signal outside the proxy", make=coupled_signal(False), coupled=True, holds=()),
    Case(what="signal in the proxy", make=coupled_signal(True), coupled=True, signal=True),
    Case(what="signal in the proxy and sizes by class", make=signal_and_sizes, coupled=True, signal=True),
    Case(what="isotropic gradients", make=isotropic, coupled=False, holds=UNCOUPLED_CONTROLS),
    Case(what="six large coordinates in both", make=rogue, coupled=False, holds=("signs",)),
    Case(what="equal energy in directions 1 to 2r", make=level(), coupled=False, holds=_NEXT),
    Case(what="the same, serial correlation", make=level(correlated=True), coupled=False, holds=_NEXT),
    Case(what="the same, document means", make=level(documents=True), coupled=False, holds=_NEXT),
    Case(what="the same, three large coordinates", make=level(large=True), coupled=False, holds=_NEXT),
    Case(what="the same, a common mean", make=level(mean=True), coupled=False, holds=("span",)),
    Case(what="the same, states in four clouds", make=level(clouds=True), coupled=False, holds=_NEXT),
    Case(what="the same, proxies from half as many states", make=level(fitted=FITTED // 2), coupled=False, holds=_NEXT),
    Case(what="the same, a few documents own the gradient", make=level(heavy=True), coupled=False, holds=_NEXT),
    Case(what="energy that shuffled targets have too", make=toward_with_any_target, coupled=False, holds=("shuffled",)),
    Case(what="energy outside the proxy", make=toward(False), coupled=False),
    Case(what="energy in the proxy", make=toward(True), coupled=False, signal=True),
)
# Without a hypothesis that is true, and yet not to be called tangent.
SILENT = ("signal outside the proxy", "energy outside the proxy")


def align(one: Drawn, proxy: Proxy, seed: int, *, coupled: bool, documents: Tensor | None = None) -> Alignment:
    documents = one.documents if documents is None else documents
    others = None if one.shuffled is None else one.shuffled[None]
    if coupled:
        keep = torch.ones(1, len(one.states), dtype=torch.bool)
        pair, extra = (
            None
            if rows is None
            else pair_each(one.states[None], rows, one.windows, keep=keep, documents=documents, draws=DRAWS, seed=seed)
            for rows in (one.gradients[None], others)
        )
        assert pair is not None
        return coupled_alignments(pair, [[proxy]], draws=19, seed=seed, shuffled=extra)[0][0]
    settings: dict[str, Any] = {"documents": documents, "states": one.states[None], "shuffled": others}
    return uncoupled_alignments(one.gradients[None], [[proxy]], draws=DRAWS, seed=seed, **settings)[0][0]


def before(one: Drawn, proxy: Proxy, seed: int, found: Alignment, *, coupled: bool) -> bool:
    """What was flagged before: by permuted windows alone; above the next directions, with the p of other controls."""
    if coupled:
        apart = bool((one.documents == one.windows).all())
        found = found if apart else align(one, proxy, seed, coupled=True, documents=one.windows)
        return found.controls["permuted"].p <= NOMINAL
    following = energy_of(second_moment(one.gradients), proxy.following)
    others = [found.controls[name] for name in ("haar", "signs")]
    beyond = found.energy.value > max(following, *(control.value for control in others))
    return beyond and max(control.p for control in others) <= NOMINAL


def rates(case: Case, draws: int) -> dict[str, Any]:
    """The share of draws that each control flags, the one that decides, and what did before."""
    names = [*(COUPLED_CONTROLS if case.coupled else UNCOUPLED_CONTROLS), "shuffled"]
    flagged, excess = dict.fromkeys([*names, "hardest", "before"], 0), []
    for seed in range(draws):
        one = case.make(torch.Generator().manual_seed(seed))
        proxy = fit_global(one.fit, rank=RANK)
        if one.shuffled is None:
            flagged.pop("shuffled", None)
        found = align(one, proxy, seed, coupled=case.coupled)
        for name in flagged.keys() & {*names}:
            flagged[name] += name in found.controls and found.controls[name].p <= NOMINAL
        flagged["hardest"] += found.p <= NOMINAL
        flagged["before"] += before(one, proxy, seed, found, coupled=case.coupled)
        excess.append(found.excess)
    known = [value for value in excess if not math.isnan(value)]
    return {
        "case": case.what,
        "gradient": "coupled" if case.coupled else "uncoupled",
        "signal": case.signal,
        "holds": list(case.holds),
        "draws": draws,
        "rates": {name: round(count / draws, 4) for name, count in flagged.items()},
        "excess": round(sum(known) / len(known), 4) if known else None,
    }


def rule_for_models(shared: float, draws: int) -> dict[str, Any]:
    """How often most blocks of a model are flagged whose gradients have equal energy in directions 1 to 2r.

    `shared` is the correlation of the gradients of two blocks.
    """
    counted, energy = {"hardest": 0, "before": 0}, torch.where(torch.arange(DIM) < 2 * RANK, 1.0, 0.3)
    for seed in range(draws):
        chance = torch.Generator().manual_seed(seed)
        axes = turned(chance)
        fit, states = (noise(chance, count, DIM) * falling() @ axes for count in (FITTED, TOKENS))
        proxy, common = fit_global(fit, rank=RANK), noise(chance, TOKENS, DIM)
        blocks, earlier = [], 0
        for _ in range(BLOCKS):
            rows = math.sqrt(shared) * common + math.sqrt(1 - shared) * noise(chance, TOKENS, DIM)
            one = drawn(fit, states, rows * energy @ axes)
            blocks.append(align(one, proxy, seed, coupled=False))
            earlier += before(one, proxy, seed, blocks[-1], coupled=False)
        most = 2 * sum(one.p <= NOMINAL for one in blocks) > BLOCKS
        mean = sum(one.excess for one in blocks)
        counted["hardest"] += most and simes([one.p for one in blocks]) <= NOMINAL and mean > 0
        counted["before"] += 2 * earlier > BLOCKS
    return {"shared": shared, "draws": draws, "rates": {name: count / draws for name, count in counted.items()}}


ASSUMED = {
    "permuted": (
        "gradients are independent of states; documents are exchangeable",
        "sizes of gradients go with the states",
    ),
    "permuted_directions": (
        "directions of gradients are independent of states and sizes; documents are exchangeable",
        "directions are spread differently where gradients are large",
    ),
    "flipped": (
        "given the states, the gradients of a document are as likely as their negatives; documents are independent",
        "gradients have something in common that does not depend on the states, as at masked tokens",
    ),
    "haar": ("the proxy is a random subspace", "few coordinates are large in states and gradients"),
    "signs": (
        "the proxy has random signs of its coordinates",
        "gradients are large in all directions of large variance",
    ),
    "span": (
        "all orientations are alike in the span of the first 2r principal directions",
        "documents differ in how much energy they have where",
    ),
    "next": (
        "as much energy in the next r principal directions; at least 32 independent documents",
        "few coordinates are large in both; a common mean lies in one of the two by chance",
    ),
    "shuffled": ("as much energy with shuffled targets; asked for by name", "shuffled targets give smaller gradients"),
}


def share(rate: float) -> str:
    return "0" if rate == 0 else f"{rate:.3f}".lstrip("0") if rate < 1 else "1"


def table(found: Mapping[str, Any]) -> str:
    """The section of docs/methods.md between its marks."""
    cases: Sequence[Mapping[str, Any]] = found["cases"]
    lines = ["| control | assumes | breaks when | flagged where it holds | where it does not | power |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for name, (assumes, breaks) in ASSUMED.items():
        known = [one for one in cases if name in one["rates"]]
        free = [one for one in known if not one["signal"]]
        parts = (
            [one for one in free if name in one["holds"]],
            [one for one in free if name not in one["holds"] and one["case"] not in SILENT],
            [one for one in known if one["signal"]],
        )
        seen = [[one["rates"][name] for one in some] for some in parts]
        spans = ["-" if not some else share(max(some)) if at < 2 else share(min(some)) for at, some in enumerate(seen)]
        lines.append(f"| `{name}` | {assumes} | {breaks} | {' | '.join(spans)} |")
    lines += [
        "",
        "| case | gradient | true hypotheses | before | now | mean excess |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in cases:
        holds = ", ".join(f"`{name}`" for name in one["holds"]) or ("signal" if one["signal"] else "none")
        excess = "-" if one["excess"] is None else f"{one['excess']:.3f}"
        rate = [share(one["rates"][name]) for name in ("before", "hardest")]
        lines.append(f"| {one['case']} | {one['gradient']} | {holds} | {rate[0]} | {rate[1]} | {excess} |")
    lines += ["", f"| most of {BLOCKS} blocks flagged, equal energy in directions 1 to 2r | before | now |"]
    lines += ["| --- | --- | --- |"]
    for one in found["models"]:
        rate = [share(one["rates"][name]) for name in ("before", "hardest")]
        lines.append(f"| correlation of blocks {one['shared']:g} | {rate[0]} | {rate[1]} |")
    return "\n".join(lines)


def measure(draws: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for case in CASES:
        yield "cases", rates(case, draws)
    for shared in (0.0, 0.5, 1.0):
        yield "models", rule_for_models(shared, max(1, draws * MODELS // 500))


def write(found: Mapping[str, Any]) -> None:
    STORED.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    text = PAGE.read_text("utf-8")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(f"{text[:start]}\n{table(found)}\n{text[end:]}", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=500)
    found: dict[str, Any] = {"nominal": NOMINAL, "cases": [], "models": []}
    for part, one in measure(parser.parse_args().draws):
        found[part].append(one)
        print(part, one, flush=True)
    write(found)


if __name__ == "__main__":
    main()
