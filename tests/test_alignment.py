"""Alignment through the walk: rows, their columns, and the numbers against plain sums."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anisoscope as an
from anisoscope import alignment
from anisoscope.corpora import load_corpus
from anisoscope.errors import SpecError
from anisoscope.gauge import seed_for
from anisoscope.gradients import capture_gradients
from anisoscope.kernels.queues import few_threads
from anisoscope.layout import select_sites
from anisoscope.models import Model, load_model
from anisoscope.printing import format_value, print_unit
from anisoscope.probed import Probed
from anisoscope.probes import draw_probe
from anisoscope.records import Record, Site, describe_text
from anisoscope.tangent.energies import COUPLED_CONTROLS, UNCOUPLED_CONTROLS, coupled_alignment
from anisoscope.tangent.proxies import fit_global
from anisoscope.tangent.windows import pair_windows
from anisoscope.walk import draw

FAMILY = ("tangent_energy", "tangent_gain", "tangent_excess", "normal_ratio", "gradient_leading_variance")
BESIDE = ("tangent_anisotropy_share", "tangent_frequency_trend")
SITE = Site(name="block.2", depth=0.5)


def spec_for(**changes: Any) -> an.Spec:
    given = {"model": "pocket-decoder", "tokens": 64 * 32, "seq_len": 32, "rank": 8, "sites": ("block.2",)}
    return an.Spec(**{"metrics": ("alignment",), **given, **changes})


@pytest.fixture(scope="module")
def decoder() -> Model:
    return load_model("pocket-decoder", device="cpu")


@pytest.fixture(scope="module")
def unit(decoder: Model) -> an.Unit:
    return an.measure(spec_for(populations=("all", "typical")), model=decoder, progress=False)


def rows(unit: an.Unit, **wanted: Any) -> list[Record]:
    return [row for row in unit.records if all(getattr(row, name) == value for name, value in wanted.items())]


def one(unit: an.Unit, **wanted: Any) -> Record:
    (found,) = rows(unit, **wanted)
    return found


def test_every_gradient_proxy_population_and_variant_has_its_rows(unit: an.Unit) -> None:
    assert {row.metric for row in unit.records} == {*FAMILY, *BESIDE}
    plain = [row for row in unit.records if row.metric in FAMILY and row.bin is None]
    for name, known in (
        ("gradient", {"virtual", "activation"}),
        ("proxy", {"pca", "seminmf"}),
        ("population", {"all", "typical"}),
        ("variant", {"mean=in", "mean=out"}),
    ):
        assert {getattr(row, name) for row in plain} == known
    assert len(plain) == (len(FAMILY) - 1) * 2**4 + 2**3
    for row in plain:
        assert row.points + row.excluded == 32 * 32
        assert not math.isnan(row.value), row
    # Points of a bin, and types, are not what a population left.
    others = [row for row in unit.records if row.bin is not None or row.metric == "tangent_frequency_trend"]
    assert others
    assert {row.excluded for row in others} == {0}
    for row in rows(unit, metric="tangent_excess"):
        assert row.p is not None
        assert 1 / 200 <= row.p <= 1
        energy = one(
            unit,
            metric="tangent_energy",
            bin=None,
            **{n: getattr(row, n) for n in ("gradient", "proxy", "population", "variant")},
        )
        assert row.control_value is not None
        assert row.value == pytest.approx(energy.value - row.control_value, abs=1e-9)
        assert energy.low is not None
        assert energy.high is not None
        assert energy.low < energy.high
    assert {row.control for row in rows(unit, metric="tangent_excess", gradient="virtual")} <= {*COUPLED_CONTROLS}
    assert {row.control for row in rows(unit, metric="tangent_excess", gradient="activation")} <= {*UNCOUPLED_CONTROLS}
    assert {row.control for row in rows(unit, metric="normal_ratio")} == {"normal"}


def test_gradients_are_those_of_typical_tokens_unless_others_are_asked_for(unit: an.Unit, decoder: Model) -> None:
    usual = an.measure(spec_for(), model=decoder, progress=False)
    assert len(usual.records) == len(rows(usual, population="typical"))
    for alone, beside in zip(rows(usual, population="typical"), rows(unit, population="typical"), strict=True):
        # As below: products of more places are rounded otherwise, and ranks of types with equal energies change places.
        rounding = 1e-4 if alone.metric == "tangent_frequency_trend" else 1e-6
        assert beside.value == pytest.approx(alone.value, rel=2e-6, abs=rounding), (alone.metric, alone.site)


def test_places_that_are_fitted_side_by_side_have_the_same_numbers(
    decoder: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sites with unequal numbers of typical tokens.
    spec = spec_for(sites=("embed", "block.1", "block.4"), populations=("all", "typical"))
    groups: list[list[int]] = []
    whole = alignment._Analysis.places

    def seen(self: Any, populations: Sequence[str]) -> Iterator[list[Any]]:
        for group in whole(self, populations):
            groups.append([len(place.fitted) for place in group])
            yield group

    monkeypatch.setattr(alignment._Analysis, "places", seen)
    monkeypatch.setitem(alignment.FITTED_ELEMENTS, "cpu", 1)
    alone = an.measure(spec, model=decoder, progress=False)
    assert {len(group) for group in groups} == {1}
    groups.clear()
    monkeypatch.setitem(alignment.FITTED_ELEMENTS, "cpu", 1 << 30)
    beside = an.measure(spec, model=decoder, progress=False)
    assert len(groups) == 1
    assert len(set(groups[0])) > 1
    for one, two in zip(alone.records, beside.records, strict=True):
        place = (one.metric, one.site, one.population, one.gradient, one.proxy, one.variant, one.control)
        # Products of several places are rounded otherwise than those of one; of two types with the same energy but for
        # rounding, the ranks of a trend may change places.
        rounding = 1e-4 if one.metric == "tangent_frequency_trend" else 2e-6
        assert two.value == pytest.approx(one.value, rel=2e-6, abs=rounding, nan_ok=True), place


def test_places_have_the_tokens_of_their_population(decoder: Model) -> None:
    spec = spec_for(sites=("embed", "block.4"))
    probed = Probed(
        model=decoder,
        probe=draw_probe(spec, decoder.tokenizer, load_corpus("pydoc")),
        sites=select_sites(decoder.layout, spec.sites),
        spec=spec,
    )
    named = ("all", "content", "typical", "types", "matched")
    places = [place for some in alignment._Analysis(probed, {}).places(named) for place in some]
    assert len(places) == 2 * len(named)
    for place in places:
        states, tokens = probed.fit_states[place.site], probed.fit_tokens(place.fitted.device)
        assert torch.equal(place.fitted, states[probed.members(place.population, states, tokens)])
        tested = probed.members(place.population, place.here.values, probed.gradients.tokens)
        assert torch.equal(place.keep.nonzero().flatten(), tested)


def test_a_population_that_is_named_twice_is_measured_once(decoder: Model) -> None:
    once, twice = (
        an.measure(spec_for(populations=named), model=decoder, progress=False) for named in (("all",), ("all", "all"))
    )
    assert twice.key == once.key
    assert len(twice.records) == len(once.records)
    assert twice.attachments.keys() == once.attachments.keys()


def test_threads_come_back_whatever_happens() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with few_threads(torch.device("cpu")):
            assert torch.get_num_threads() == 2
        few = few_threads(torch.device("cuda"))
        few.__enter__()
        assert torch.get_num_threads() == 1
        assert not few.__exit__(ValueError, ValueError("on the way"), None)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["pocket-decoder", "pocket-encoder"])
def test_energies_are_those_of_plain_sums(name: str) -> None:
    """Of an encoder on text that is masked in both halves: its gradients belong to such states."""
    spec, model = spec_for(model=name, populations=("all",)), load_model(name, device="cpu")
    unit = an.measure(spec, model=model, progress=False)
    probe = draw_probe(spec, model.tokenizer, load_corpus("pydoc"))
    assert not set(np.unique(probe.fit.documents)) & set(np.unique(probe.test.documents))
    seeds = [seed_for(0, half, 2) for half in range(2)]
    test = capture_gradients(model, probe.test, [SITE], seed=seeds[1]).sites[SITE]
    fit = capture_gradients(model, probe.fit, [SITE], seed=seeds[0]).sites[SITE].values.double()
    basis = torch.linalg.svd(fit - fit.mean(0), full_matrices=False).Vh[:8].T
    states, gradients = test.values.double(), test.gradients.double()
    energy = (gradients @ basis).square().sum() / gradients.square().sum()
    chosen = {"proxy": "pca", "population": "all", "variant": "mean=in"}
    assert one(unit, metric="tangent_energy", gradient="activation", **chosen).value == pytest.approx(
        float(energy), rel=1e-4
    )
    virtual = (gradients - gradients.mean(0)).T @ (states - states.mean(0))
    energy = (virtual @ basis).square().sum() / virtual.square().sum()
    assert one(unit, metric="tangent_energy", gradient="virtual", **chosen).value == pytest.approx(
        float(energy), rel=1e-4
    )
    leading = torch.linalg.svdvals(gradients).square()
    share = one(unit, metric="gradient_leading_variance", gradient="activation", **chosen)
    assert share.value == pytest.approx(float(leading[0] / leading.sum()), rel=1e-4)


def test_an_untrained_encoder_knows_of_nothing_but_masks_and_is_not_called_tangent() -> None:
    """Its own states, masked as it reads them, and gradients that are noise where something is predicted."""
    spec = spec_for(model="pocket-encoder", revision="step0", tokens=2 * 64 * 32)
    model = load_model("pocket-encoder", revision="step0", device="cpu")
    probe = draw_probe(spec, model.tokenizer, load_corpus("pydoc"))
    sites = select_sites(model.layout, spec.sites)
    probed = Probed(model=model, probe=probe, sites=sites, spec=spec)
    shown, (site,) = probed.gradients, sites
    masked = shown.read != shown.tokens.ids
    proxy = fit_global(probed.proxy_states[site], rank=8)
    # Where masks are in the states of the proxy, it has more of theirs than one of plain text.
    plain = fit_global(probed.fit_states[site], rank=8)
    away = shown.sites[site].values[masked].mean(0) - shown.sites[site].values[~masked].mean(0)
    assert (proxy.basis.T @ away).norm() > 0.9 * away.norm()
    assert (plain.basis.T @ away).norm() < 0.7 * away.norm()
    flagged = []
    for seed in range(60):
        chance = torch.Generator().manual_seed(seed)
        noise = torch.randn(1, 112, generator=chance) + torch.randn(len(masked), 112, generator=chance)
        pairing = pair_windows(shown.sites[site].values, masked[:, None] * noise, shown.windows, draws=59, seed=seed)
        flagged.append(coupled_alignment(pairing, proxy, draws=19, seed=seed).p <= 0.05)
    assert sum(flagged) <= 9  # of 60 at .05: in one of 1,300 such series more


def test_a_trained_decoder_is_enriched_over_permuted_windows(unit: an.Unit) -> None:
    found = one(unit, metric="tangent_excess", gradient="virtual", proxy="pca", population="all", variant="mean=in")
    assert found.value > 0
    assert found.p is not None
    assert found.p <= 0.02


def test_too_few_windows_have_no_permuted_null(decoder: Model) -> None:
    few = an.measure(spec_for(tokens=31 * 32, gradients=("virtual",)), model=decoder, progress=False)
    for row in rows(few, metric="tangent_excess"):
        assert math.isnan(row.value)
        assert row.note is not None
        assert "a permuted null needs at least 32" in row.note
    assert all(row.value > 0 for row in rows(few, metric="tangent_energy", bin=None))


def test_what_cannot_be_asked_is_refused(decoder: Model) -> None:
    with pytest.raises(SpecError, match="must be out of virtual, activation, embedding, and linear:PATH"):
        an.measure(spec_for(gradients=("weight",)), model=decoder, progress=False)
    with pytest.raises(SpecError, match=r"proxy .* must be one of pca, svd, seminmf, local_pca; got 'ica'"):
        an.measure(spec_for(proxy="ica"), model=decoder, progress=False)
    with pytest.raises(
        SpecError, match=r"controls .* must be out of type_disjoint, shuffled_targets, paper_normals, shares"
    ):
        an.measure(spec_for(controls=("shuffled",)), model=decoder, progress=False)
    with pytest.raises(SpecError, match="the control shares is about tangent_anisotropy_share: ask for it"):
        an.measure(spec_for(controls=("shares",), metrics=("tangent_excess",)), model=decoder, progress=False)
    with pytest.raises(
        SpecError, match="must be a whole number of at least 1 or one of variance:SHARE, participation_ratio, twonn"
    ):
        an.measure(spec_for(rank="foo", metrics=("mean_cosine",)), model=decoder, progress=False)
    with pytest.raises(SpecError, match="a SHARE above 0 and at most 1; got 'variance:2'"):
        an.measure(spec_for(rank="variance:2", metrics=("mean_cosine",)), model=decoder, progress=False)
    with pytest.raises(SpecError, match=r"a whole number of at least 1 .*; got 0"):
        an.measure(spec_for(rank=0, metrics=("mean_cosine",)), model=decoder, progress=False)
    with pytest.raises(SpecError, match="give grads="):
        an.estimate(np.eye(4), ["tangent_excess"])
    local = {"grads": np.eye(64), "windows": np.arange(64), "proxy": "local_pca"}
    with pytest.raises(SpecError, match="local_pca has a space for each token, and one for all was asked for"):
        an.estimate(np.eye(64), ["tangent_excess"], **local)


def test_alignment_comes_with_other_metrics_and_an_encoder_has_it_too() -> None:
    encoder = load_model("pocket-encoder", device="cpu")
    spec = spec_for(
        model="pocket-encoder", metrics=("alignment", "mean_cosine"), gradients=("virtual",), batch_points=512
    )
    found = an.measure(replace(spec, populations=("all",)), model=encoder, progress=False)
    assert {row.metric for row in found.records} == {*FAMILY, "tangent_anisotropy_share", "mean_cosine"}
    assert {row.population for row in found.records} == {"all"}
    assert one(found, metric="tangent_energy", proxy="pca", variant="mean=in").value > 8 / 112


def test_shares_of_anisotropy_have_controls_of_their_own_where_asked_for(unit: an.Unit, decoder: Model) -> None:
    spec = spec_for(controls=("shares",), metrics=("tangent_anisotropy_share",))
    found = an.measure(spec, model=decoder, progress=False)
    harder = [row for row in found.records if row.control in ("permuted", "haar", "signs")]
    controls = {"virtual": ("permuted",), "activation": ("haar", "signs")}
    assert {(row.gradient, row.control, row.proxy, row.variant, row.site) for row in harder} == {
        (gradient, control, proxy, f"mean={mean};share={way}", row.site)
        for mean in ("in", "out")
        for gradient, names in controls.items()
        for control in names
        for proxy in ("pca", "seminmf")
        for way in ("isoscore", "energy")
        for row in harder
    }
    for row in harder:
        told = {"metric": row.metric, "gradient": row.gradient, "proxy": row.proxy, "variant": row.variant}
        assert row.value == one(found, **told, control="normal", site=row.site).value
        assert row.p is not None
        assert 1 / 200 <= row.p <= 1
    for proxy in ("pca", "seminmf"):
        told = {"gradient": "virtual", "proxy": proxy, "variant": "mean=in;share=energy"}
        # Pairs hardly matter to what random normals see.
        assert one(found, **told, control="permuted").control_value > one(found, **told, control="normal").control_value
    assert not rows(unit, control="permuted", metric="tangent_anisotropy_share")


def test_removing_the_proxy_is_held_against_normals_and_the_next_directions(unit: an.Unit) -> None:
    for gradient, proxy in (("virtual", "pca"), ("activation", "seminmf")):
        chosen = {"metric": "tangent_anisotropy_share", "gradient": gradient, "proxy": proxy, "population": "typical"}
        found = rows(unit, **chosen)
        assert {row.variant for row in found} == {
            *(f"mean=in;share={way}" for way in ("isoscore", "leading", "spectral", "energy")),
            *(f"mean=out;share={way}" for way in ("isoscore", "energy")),
        }
        for way in ("isoscore", "spectral"):
            normal, following = (
                one(unit, **chosen, variant=f"mean=in;share={way}", control=name) for name in ("normal", "next")
            )
            assert normal.value == following.value
            assert normal.p is not None
            assert following.p is None
            assert normal.control_value is not None
            assert normal.value > normal.control_value


def test_bins_of_frequency_are_ordered_and_hold_equally_many_tokens(unit: an.Unit) -> None:
    for population, mean in itertools.product(("all", "typical"), ("mean=in", "mean=out")):
        bins = [
            row
            for row in rows(unit, metric="tangent_energy", proxy="pca", population=population)
            if row.bin is not None and (row.variant or "").startswith(f"{mean};")
        ]
        assert [row.bin for row in bins] == list(range(len(bins)))
        assert len(bins) >= 8
        assert len({row.points for row in bins}) == 1
        frequencies = [float((row.variant or "").rpartition("=")[2]) for row in bins]
        assert frequencies == sorted(frequencies)
        assert all(row.gradient == "activation" for row in bins)
        energies = one(
            unit,
            metric="tangent_energy",
            proxy="pca",
            population=population,
            variant=mean,
            bin=None,
            gradient="activation",
        )
        assert min(row.value for row in bins) < energies.value < max(row.value for row in bins)
        trend = one(unit, metric="tangent_frequency_trend", proxy="pca", population=population, variant=mean)
        assert trend.p is not None
        assert trend.low is not None
        assert trend.low < trend.value < (trend.high or 0)


def test_frequencies_come_from_other_documents_than_the_test_half(decoder: Model) -> None:
    corpus = load_corpus("pydoc")
    probe = draw_probe(spec_for(), decoder.tokenizer, corpus)
    tested = set(np.unique(probe.test.documents).tolist())
    others = replace(corpus, documents=tuple(text for i, text in enumerate(corpus.documents) if i not in tested))
    whole = np.exp(draw_probe(spec_for(), decoder.tokenizer, others).log_frequency)
    assert np.exp(probe.log_frequency).sum() == pytest.approx(1, abs=1e-2)
    assert np.corrcoef(np.exp(probe.log_frequency), whole)[0, 1] > 0.99


def test_a_proxy_of_other_types_and_local_proxies_are_there_where_asked(decoder: Model) -> None:
    spec = spec_for(controls=("type_disjoint",), proxy="local_pca", populations=("typical",), tokens=128 * 32)
    found = an.measure(spec, model=decoder, progress=False)
    strict = rows(found, metric="tangent_excess", variant="mean=in;split=types", proxy="pca", gradient="virtual")
    usual = one(found, metric="tangent_excess", variant="mean=in", proxy="pca", gradient="virtual")
    assert len(strict) == 1
    assert strict[0].points < usual.points
    local = one(found, metric="tangent_excess", proxy="local_pca")
    assert (local.gradient, local.control, local.rank) == ("activation", "permuted", 8)


def test_shuffled_targets_are_among_the_controls_that_decide(decoder: Model, unit: an.Unit) -> None:
    spec = spec_for(controls=("shuffled_targets",), populations=("all", "typical"))
    found = an.measure(spec, model=decoder, progress=False)
    shuffled = rows(found, control="shuffled", metric="tangent_energy")
    assert len(shuffled) == 2**4
    for row, usual in zip(found.records, unit.records, strict=True):
        if row.metric in ("tangent_excess", "tangent_gain") and row.gradient != "activation":
            # Hardest of more.
            assert (row.p or 0) >= (usual.p or 0)
        elif row.metric == "tangent_excess":
            assert row.control != "shuffled" or (row.p or 0) >= (usual.p or 0)
        else:
            assert replace(row, key="", control=None, control_value=None) == replace(
                usual, key="", control=None, control_value=None
            ) or math.isnan(row.value)
    decided = rows(found, control="shuffled", metric="tangent_excess")
    # As large an energy with any targets: the Jacobian and the frequencies of tokens account for it.
    assert decided
    for row in decided:
        place = {name: getattr(row, name) for name in ("gradient", "proxy", "population", "variant")}
        assert row.control_value == one(found, metric="tangent_energy", bin=None, **place).control_value
    probed = Probed(
        model=decoder,
        probe=draw_probe(spec, decoder.tokenizer, load_corpus("pydoc")),
        sites=select_sites(decoder.layout, ("block.2",)),
        spec=spec,
    )
    dealt = probed.shuffled_gradients
    true, other = (float(torch.nansum(half.tokens.losses)) for half in (probed.gradients, dealt))
    assert other > 1.2 * true
    basis = fit_global(probed.fit_states[SITE], rank=8).basis
    activation = dealt.sites[SITE].gradients
    wanted = {"gradient": "activation", "proxy": "pca", "population": "all", "variant": "mean=in"}
    row = one(found, metric="tangent_energy", control="shuffled", **wanted)
    expected = (activation @ basis).double().square().sum() / activation.double().square().sum()
    assert row.control_value == pytest.approx(float(expected), rel=1e-4)
    assert row.control_value != pytest.approx(row.value, rel=1e-2)


def test_linear_modules_and_embedding_rows_have_alignments_of_their_own(decoder: Model) -> None:
    path = next(name for name, _ in decoder.module.named_modules() if name.endswith("2.mlp.dense_h_to_4h"))
    spec = spec_for(gradients=(f"linear:{path}", "embedding"), sites=("embed", "final_norm"), populations=("all",))
    found = an.measure(spec, model=decoder, progress=False)
    linear = one(found, metric="tangent_excess", gradient="linear", proxy="pca", variant="mean=in")
    assert linear.site == path
    assert linear.control in COUPLED_CONTROLS
    rows_of_embedding = rows(found, metric="tangent_excess", gradient="embedding", proxy="pca")
    assert {row.site for row in rows_of_embedding} == {"embed", "final_norm"}
    assert {row.population for row in rows_of_embedding} == {"types"}
    assert {row.control for row in rows_of_embedding} <= {*UNCOUPLED_CONTROLS}


def test_sketches_give_back_the_proxies_they_were_made_of(unit: an.Unit, decoder: Model) -> None:
    from anisoscope.past import Past
    from anisoscope.probed import Probed
    from anisoscope.tangent.dynamics import turn_between
    from anisoscope.tangent.proxies import fit_global

    spec = spec_for()
    probed = Probed(
        model=decoder, probe=draw_probe(spec, decoder.tokenizer, load_corpus("pydoc")), sites=(SITE,), spec=spec
    )
    states = probed.fit_states[SITE]
    past = Past(
        fits={"rolling": [unit.attachments], "frozen": [unit.attachments] * 3}, steps={"rolling": "1", "frozen": "1"}
    )
    for method in ("pca", "seminmf"):
        fitted = fit_global(states, method=method, rank=8, seed=0)
        found = list(past.proxies(SITE, "all", method, 8, states))
        assert len(found) == 2
        for _, proxy in found:
            assert turn_between(proxy.basis, fitted.basis).grassmann < 0.02
            assert turn_between(proxy.following, fitted.following).grassmann < (0.05 if method == "pca" else 1.5)
            assert float((proxy.basis.T @ proxy.following).abs().max()) < 1e-3


@pytest.mark.parametrize("method", ["pca", "seminmf"])
def test_a_pool_of_sketches_is_the_proxy_of_the_pooled_states(method: str) -> None:
    """Three checkpoints share directions in which little varies; all that the fourth has varies in others."""
    from anisoscope.past import Past, sketch
    from anisoscope.tangent.proxies import fit_each, fit_global

    draw, widths = torch.Generator().manual_seed(0), torch.full((4, 32), 1.0)
    widths[:3, :4], widths[3] = 1.2, 0.1
    widths[3, 10:14] = 10
    several = [torch.randn(2000, 32, generator=draw) * width for width in widths]
    fits = fit_each([[one] for one in several], methods=("pca", "seminmf"), ranks=[4] * 4)
    units = [sketch([(SITE, "all")], [fit]) for fit in fits]
    ((_, pooled),) = Past(fits={"frozen": units}, steps={"frozen": "0, 1, 2, 3"}).proxies(
        SITE, "all", method, 4, several[0]
    )
    of_states = fit_global(several, method=method, rank=4)
    # Of checkpoints in which everything varies, the eight axes that are known turn the pool a little.
    assert float((pooled.basis.T @ of_states.basis).square().sum()) == pytest.approx(4, abs=0.1)
    assert float(pooled.basis[10:14].square().sum()) == pytest.approx(4, abs=0.1)


def test_a_sweep_follows_the_proxies_of_earlier_checkpoints(tmp_path) -> None:
    from anisoscope.checkpoints import find_checkpoints
    from anisoscope.sweep import plan_specs, run_sweep

    chosen = [item for item in find_checkpoints("pocket-decoder") if item.step in (0, 64, 4096)]
    settings = {"tokens": 64 * 32, "seq_len": 32, "rank": 4, "sites": ("block.2",), "metrics": ("alignment",)}
    specs = plan_specs(chosen, ["pydoc"], settings | {"populations": ("all",), "gradients": ("virtual",)})
    swept = run_sweep(specs, tmp_path, checkpoints=chosen, progress=False, follow=True)
    assert (len(swept.measured), swept.failed) == (5, ())
    again = run_sweep(specs, tmp_path, checkpoints=chosen, progress=False, follow=True)
    assert (len(again.measured), len(again.stored_before)) == (0, 5)
    found = [row for row in an.Store(tmp_path).table().to_pylist() if "fit=" in (row["variant"] or "")]
    fits = {(row["step"], row["variant"].rpartition("fit=")[2]) for row in found}
    assert fits == {(64, "untrained"), (64, "rolling"), (4096, "untrained"), (4096, "rolling"), (4096, "frozen")}
    far = {row["step"]: row for row in found if row["metric"] == "subspace_distance" and row["proxy"] == "pca"}
    assert 0 < far[4096]["value"] <= far[4096]["control_value"] * 1.05
    energy = {
        row["variant"]: row["value"]
        for row in found
        if row["step"] == 4096 and row["metric"] == "tangent_energy" and row["proxy"] == "pca"
    }
    assert energy["mean=in;fit=rolling"] > energy["mean=in;fit=untrained"]
    assert energy.keys() >= {f"mean={way};fit={fit}" for way in ("in", "out") for fit in ("rolling", "untrained")}


def test_following_without_gradients_is_refused(tmp_path) -> None:
    from anisoscope.checkpoints import find_checkpoints
    from anisoscope.sweep import plan_specs, run_sweep

    chosen = [item for item in find_checkpoints("pocket-decoder") if item.step in (0, 64)]
    specs = plan_specs(chosen, ["pydoc"], {"tokens": 2048, "seq_len": 32, "metrics": ("mean_cosine",)})
    with pytest.raises(SpecError, match="there is nothing to follow"):
        run_sweep(specs, tmp_path, checkpoints=chosen, progress=False, follow=True)


def test_references_to_earlier_units_are_written_and_read_back() -> None:
    from anisoscope.past import choose_past, read_reference, write_reference

    keys = {"rolling": ("a",), "frozen": ("a", "b")}
    assert read_reference(write_reference(keys)) == keys
    with pytest.raises(SpecError, match="proxy_from is FIT=KEY"):
        read_reference("newest=a")
    assert choose_past([0], 0, 10) == {}
    assert choose_past([4, 8], 1, 10) == {"rolling": (0,)}
    assert choose_past([None, None], 1, None) == {"rolling": (0,)}
    many = choose_past([*range(100), 1000], 100, 1000)
    assert len(many["frozen"]) == 8
    assert many["frozen"][0] == 0
    assert many["frozen"][-1] == 99


def test_matrices_of_your_own_give_what_the_walk_gives(decoder: Model) -> None:
    spec = spec_for(tokens=128 * 32)
    probe = draw_probe(spec, decoder.tokenizer, load_corpus("pydoc"))
    both = capture_gradients(decoder, probe.windows, [SITE])
    states, gradients = both.sites[SITE].values, both.sites[SITE].gradients
    given = {"grads": gradients, "windows": both.windows, "rank": 8}
    found = an.estimate(states, ["tangent_excess", "normal_ratio", "tangent_anisotropy_share"], **given)
    assert found["tangent_excess"].value > 0
    assert found["tangent_excess"].control in COUPLED_CONTROLS
    assert found["tangent_excess"].p <= 0.02
    assert found["normal_ratio"].value > 2
    assert found["tangent_anisotropy_share"].control == "normal"
    uncoupled = an.estimate(states.numpy(), "tangent_energy", grads=gradients.numpy(), rank=8, gradient="activation")
    assert 8 / 112 < uncoupled["tangent_energy"].value < 1
    ids = both.tokens.ids
    known = np.exp(probe.log_frequency)[ids.numpy()]
    typed = an.estimate(states, ["type_dispersion", "leading_variance"], token_ids=ids, frequencies=known)
    assert -1 <= typed["type_dispersion"].value <= 1
    assert 0 < typed["leading_variance"].value < 1
    trend = an.estimate(states, "tangent_frequency_trend", token_ids=ids, frequencies=known, **given)
    assert trend["tangent_frequency_trend"].p is not None
    family = an.estimate(states, "alignment", token_ids=ids, frequencies=known, **given)
    assert {*FAMILY, *BESIDE} == set(family)
    assert family["tangent_excess"] == found["tangent_excess"]


def test_documents_of_your_own_are_split_whole_and_give_one_window_each() -> None:
    chance = np.random.default_rng(0)
    points, grads = (chance.normal(size=(128 * 4, 8)) for _ in range(2))
    windows = np.arange(128).repeat(4)
    given = {"grads": grads, "windows": windows, "rank": 2}
    apart = an.estimate(points, "tangent_excess", **given)["tangent_excess"]
    paired = an.estimate(points, "tangent_excess", documents=windows // 2, **given)["tangent_excess"]
    assert (apart.note, paired.note) == (None, "one window of each document: 32 of 64")
    few = an.estimate(points, "tangent_excess", documents=windows // 4, **given)["tangent_excess"]
    assert math.isnan(few.value)
    assert "16 without a document in common; a permuted null needs at least 32" in few.note
    rows = {"grads": grads, "rank": 2, "gradient": "activation"}
    uncoupled = an.estimate(points, "tangent_excess", documents=windows // 4, **rows)["tangent_excess"]
    assert "16 documents; p against next needs at least 32" in uncoupled.note
    with pytest.raises(SpecError, match="half of the documents are fitted on"):
        an.estimate(points, "tangent_excess", documents=windows * 0, **given)
    with pytest.raises(SpecError, match="documents must be 512 whole numbers"):
        an.estimate(points, "tangent_excess", documents=windows[:5], **given)


def test_a_matrix_without_what_it_needs_is_refused() -> None:
    points = np.random.default_rng(0).normal(size=(256, 8))
    with pytest.raises(SpecError, match="give windows="):
        an.estimate(points, "tangent_excess", grads=points, rank=2)
    with pytest.raises(SpecError, match="grads must be of the shape"):
        an.estimate(points, "tangent_excess", grads=points[:, :4], rank=2, gradient="activation")
    with pytest.raises(SpecError, match="give token_ids= and frequencies="):
        an.estimate(points, "centroid_distance")
    with pytest.raises(SpecError, match="numbers above 0"):
        an.estimate(points, "centroid_distance", token_ids=np.arange(256), frequencies=np.zeros(256))
    with pytest.raises(SpecError, match="gradient is virtual or activation"):
        an.estimate(points, "tangent_excess", grads=points, gradient="weight")


def test_gradients_are_printed_a_line_for_each_proxy_and_population(
    unit: an.Unit, capsys: pytest.CaptureFixture[str]
) -> None:
    print_unit(unit)
    shown = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(shown) if line.startswith("Gradients in tangent proxies"))
    lines = [line.split() for line in shown[start + 2 : start + 18]]
    assert [line[:4] for line in lines] == [
        [gradient, proxy, mean, population]
        for gradient in ("activation", "virtual")
        for proxy in ("pca", "seminmf")
        for mean in ("in", "out")
        for population in ("all", "typical")
    ]
    for gradient, proxy, mean, population, _, *cells in lines:
        place = {"gradient": gradient, "proxy": proxy, "population": population, "variant": f"mean={mean}"}
        energy, ratio = (one(unit, metric=name, bin=None, **place) for name in ("tangent_energy", "normal_ratio"))
        excess = one(unit, metric="tangent_excess", **place)
        assert excess.p is not None
        expected = [energy.value, excess.control_value, excess.value]
        np.testing.assert_allclose([float(cell) for cell in cells[:3]], expected, rtol=5e-3, atol=5e-5)
        assert cells[3] == f"{int(excess.p <= 0.05)}/1"
        assert float(cells[4]) == pytest.approx(ratio.value, rel=5e-3)
        # Of tokens, also where a trend over types stands beside.
        assert cells[5:] == [str(energy.rank), str(energy.points)]


def test_the_text_of_states_and_that_of_gradients_are_counted_apart(
    unit: an.Unit, decoder: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, text = unit.spec, unit.provenance["text"]
    corpus = load_corpus("pydoc")
    probe = draw_probe(spec, decoder.tokenizer, corpus)
    for half, windows in (("fit", probe.fit), ("test", probe.test)):
        assert text["probe"][half] == {
            "corpus": "pydoc",
            "corpus_hash": corpus.hash,
            "windows": len(windows.token_ids),
            "tokens": windows.token_ids.size,
            "documents": len(set(windows.documents.ravel().tolist())),
        }
    # Gradients alone were asked for: no states were read, and none are claimed.
    assert "states" not in text
    both = an.measure(replace(spec, metrics=("leading_variance", "tangent_energy")), model=decoder, progress=False)
    states = draw(spec, decoder, corpus)
    assert both.provenance["text"]["states"]["documents"] == len(set(states.documents.ravel().tolist()))
    assert both.provenance["text"]["probe"] == text["probe"]
    fit, test, count = len(probe.fit.token_ids), len(probe.test.token_ids), len(states.token_ids)
    print_unit(both)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"states: {count} windows of {spec.seq_len} tokens from pydoc" in shown
    assert f"gradients: probe of {fit} fit and {test} test windows of {spec.seq_len} tokens from pydoc" in shown
    # What was stored before says how many windows its states had, and no more.
    old = replace(both, provenance={**both.provenance, "windows": 7})
    del old.provenance["text"]  # pyright: ignore
    store = an.Store(tmp_path)
    store.put(old)
    print_unit(store.get(old.key))
    assert f"states: 7 windows of {spec.seq_len} tokens from pydoc ·" in " ".join(capsys.readouterr().out.split())
    assert describe_text(vars(spec), {}) == "no text"


def test_ranks_go_by_a_rule(decoder: Model) -> None:
    spec = spec_for(rank="variance:0.5", sites=("block.2", "block.5"), metrics=("tangent_excess",))
    unit = an.measure(spec, model=decoder, progress=False)
    probe = draw_probe(spec, decoder.tokenizer, load_corpus("pydoc"))
    sites = select_sites(decoder.layout, spec.sites)
    probed = Probed(model=decoder, probe=probe, sites=sites, spec=spec)
    for site in sites:
        states = probed.fit_states[site]
        kept = states[probed.members("typical", states, probed.fit_tokens(states.device))]
        shares = torch.linalg.svdvals(kept - kept.mean(0)).square()
        rank = 1 + int((shares.cumsum(0) < shares.sum() / 2).sum())
        found = rows(unit, site=site.name, proxy="pca", variant="mean=in")
        assert {row.rank for row in found} == {rank}
        assert all("by variance:0.5" in (row.note or "") for row in found)
    with pytest.raises(SpecError, match="must be a whole number of at least 1 or one of"):
        an.measure(spec_for(rank="some"), model=decoder, progress=False)


def test_a_rank_that_is_too_large_is_said_to_be_lowered(decoder: Model) -> None:
    unit = an.measure(spec_for(rank=500, metrics=("tangent_energy",)), model=decoder, progress=False)
    plain = rows(unit, bin=None, variant="mean=in")
    assert {row.rank for row in plain} == {56}
    assert {row.note for row in plain} == {"rank 56, half of the coordinates; 500 was asked for"}


def test_a_gain_stands_beside_what_it_is_over(unit: an.Unit) -> None:
    for row in rows(unit, metric="tangent_gain"):
        place = {name: getattr(row, name) for name in ("gradient", "proxy", "population", "variant")}
        energy = one(unit, metric="tangent_energy", bin=None, **place)
        assert row.control_value is not None
        assert row.control == "haar" if row.gradient == "activation" else row.control in COUPLED_CONTROLS
        assert row.value == pytest.approx(energy.value / row.control_value, rel=1e-6)


def test_signal_to_noise_and_the_share_of_variance_are_there_by_name(decoder: Model) -> None:
    asked = ("gradient_signal_to_noise", "variance_gain", "tangent_energy")
    unit = an.measure(spec_for(metrics=asked, populations=("all",)), model=decoder, progress=False)
    for metric in asked[:2]:
        assert {row.gradient for row in rows(unit, metric=metric)} == {"virtual"}
    spec = unit.spec
    probed = Probed(
        model=decoder,
        probe=draw_probe(spec, decoder.tokenizer, load_corpus("pydoc")),
        sites=select_sites(decoder.layout, spec.sites),
        spec=spec,
    )
    here = probed.gradients.sites[SITE]
    fitted = fit_global(probed.fit_states[SITE], rank=8)
    values = (here.values - here.values.mean(0)).double()
    inside = (values @ fitted.basis.double()).square().sum() / values.square().sum()
    place = {"gradient": "virtual", "proxy": "pca", "variant": "mean=in"}
    energy = one(unit, metric="tangent_energy", **place)
    assert one(unit, metric="variance_gain", **place).value == pytest.approx(energy.value / float(inside), rel=1e-4)
    # Over random halvings.
    gradients = (here.gradients - here.gradients.mean(0)).double()
    by_window = (gradients[:, :, None] * (values @ fitted.basis.double())[:, None]).unflatten(0, (32, 32)).sum(1)
    generator, agree, differ = torch.Generator().manual_seed(0), 0.0, 0.0
    for _ in range(2000):
        order = torch.randperm(32, generator=generator)
        first, second = by_window[order[:16]].sum(0), by_window[order[16:]].sum(0)
        agree += float((first * second).sum())
        differ += float((first - second).square().sum())
    assert one(unit, metric="gradient_signal_to_noise", **place).value == pytest.approx(agree / differ, rel=0.05)


def test_the_source_has_twenty_normals(decoder: Model, unit: an.Unit) -> None:
    spec = spec_for(controls=("paper_normals",), populations=("all", "typical"))
    found = an.measure(spec, model=decoder, progress=False)
    few = [row for row in found.records if (row.variant or "").endswith(";normals=20")]
    assert len(few) == 2**4
    assert {row.metric for row in few} == {"normal_ratio"}
    for row in few:
        assert row.variant is not None
        place = {name: getattr(row, name) for name in ("gradient", "proxy", "population")}
        many = one(unit, metric="normal_ratio", variant=row.variant.removesuffix(";normals=20"), **place)
        assert row.p is not None
        assert (row.p * 21) % 1 == pytest.approx(0, abs=1e-9) or (row.p * 21) % 1 == pytest.approx(1, abs=1e-9)
        assert row.value == pytest.approx(many.value, rel=0.35)
        assert row.value != many.value


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gradients": ("some:thing",)}, "must be out of virtual, activation, embedding, and linear:PATH"),
        ({"gradients": ("embedding",)}, "held against states at embed or final_norm"),
    ],
)
def test_gradients_that_would_give_nothing_are_refused(decoder: Model, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        an.measure(spec_for(**changes), model=decoder, progress=False)


def test_gradients_of_modules_come_with_and_without_the_mean_and_by_every_proxy(decoder: Model) -> None:
    path = "gpt_neox.layers.2.mlp.dense_h_to_4h"
    spec = spec_for(
        gradients=("embedding", f"linear:{path}"), sites=("embed",), proxy="svd", metrics=("tangent_energy",)
    )
    found = an.measure(spec, model=decoder, progress=False)
    for gradient in ("embedding", "linear"):
        told = {(row.proxy, row.variant) for row in rows(found, gradient=gradient)}
        assert told == {(proxy, f"mean={way}") for proxy in ("pca", "seminmf", "svd") for way in ("in", "out")}


def test_a_text_of_one_document_is_said_to_be_cut(decoder: Model, tmp_path: Path) -> None:
    text = tmp_path / "one.txt"
    text.write_text("\n".join(load_corpus("pydoc").documents[:6]), encoding="utf-8")
    unit = an.measure(spec_for(corpus=str(text), metrics=("tangent_energy",)), model=decoder, progress=False)
    assert any("the corpus is one document" in note for note in unit.provenance["notes"])


def test_what_a_split_of_types_leaves_is_printed_and_what_was_not_tested_is_not_counted(
    decoder: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_for(controls=("type_disjoint",), gradients=("virtual",), metrics=("tangent_excess",))
    print_unit(an.measure(spec, model=decoder, progress=False))
    shown = capsys.readouterr().out
    assert "in;split=types" in shown
    assert "1/1" in shown or "0/1" in shown
    # Sixteen windows: a permuted null needs twice as many.
    print_unit(an.measure(replace(spec, tokens=32 * 32, controls=()), model=decoder, progress=False))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("virtual")]
    assert lines
    assert all("0/0" in line for line in lines)


def test_numbers_of_two_kinds_are_two_lines(decoder: Model, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_for(metrics=("centroid_distance",), sites=("block.*",), populations=("content",))
    unit = an.measure(spec, model=decoder, progress=False)
    print_unit(unit)
    shown = capsys.readouterr().out.splitlines()
    for label, variant in (("centroid_distance ", None), ("centroid_distance of=mean ", "of=mean")):
        lines = [line for line in shown if line.startswith(label) and (variant or "of=mean" not in line)]
        assert len(lines) == 1
        values = [row.value for row in rows(unit, variant=variant)]
        assert f"{format_value(max(values))} @" in lines[0]
