"""How blocks of one real model depend on each other, and whether "more than half of the blocks" keeps its level there.

    python scripts/block_dependence.py       about a minute: two small models of the package, no downloads

States and gradients of 40 windows of one document each at all six blocks. Under the null of the permuted control the
window pairing is random: 500 times a random pairing is called the observed one, 199 others give each block its p (the
same pairings in every block, as in a measurement). Then: how often "most blocks" holds where none is enriched, and
where half of them are given the smallest p there is.
"""

import numpy as np
from scipy import stats

from anisoscope.claims.resampling import most
from anisoscope.corpora import load_corpus
from anisoscope.gradients import capture_gradients
from anisoscope.layout import sites_of
from anisoscope.models import load_model
from anisoscope.tangent.proxies import fit_global
from anisoscope.text import draw_windows

WINDOWS, LENGTH, DRAWS, PERMUTATIONS, RANK = 40, 64, 500, 199, 16


def energies(states: np.ndarray, gradients: np.ndarray, basis: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Share of the virtual gradient's energy in a basis, for each order of the gradients' windows."""
    states, gradients = (part - part.mean((0, 1)) for part in (states, gradients))
    # products[w, v] = gradients of window w, transposed, times the states of window v
    products = np.einsum("wti,vtj->wvij", gradients, states, optimize=True)
    found = np.empty(len(orders))
    for row, order in enumerate(orders):
        total = products[order, np.arange(WINDOWS)].sum(0)
        found[row] = ((total @ basis) ** 2).sum() / (total**2).sum()
    return found


def measure(name: str, seed: int = 0) -> dict[str, float]:
    """Correlation between blocks, and rates under the null."""
    model = load_model(name)
    corpus = load_corpus("pydoc")
    windows = draw_windows(corpus, model.tokenizer, seq_len=LENGTH, count=2 * WINDOWS, seed=seed)
    sites = [site for site in sites_of(model.layout) if site.depth is not None]
    probe = capture_gradients(model, windows, sites)
    random = np.random.default_rng(seed)
    orders = np.stack([random.permutation(WINDOWS) for _ in range(DRAWS + 2000)])
    shares = []
    for site in sites:
        values, gradients = (
            part.float().reshape(2 * WINDOWS, LENGTH, -1)
            for part in (probe.sites[site].values, probe.sites[site].gradients)
        )
        basis = fit_global(values[WINDOWS:].flatten(0, 1), method="pca", rank=RANK).basis.numpy()
        shares.append(energies(values[:WINDOWS].numpy(), gradients[:WINDOWS].numpy(), basis, orders))
    draws = np.stack(shares)
    z = stats.norm.ppf((stats.rankdata(draws, axis=1) - 0.5) / draws.shape[1])
    between = np.corrcoef(z)[~np.eye(len(sites), dtype=bool)]
    none = half = single = 0
    for draw in range(DRAWS):
        others = random.choice(np.arange(DRAWS, draws.shape[1]), PERMUTATIONS, replace=False)
        p = (1 + (draws[:, others] >= draws[:, [draw]]).sum(1)) / (1 + PERMUTATIONS)
        single += int((p <= 0.05).sum())
        none += most(p.tolist()) <= 0.05
        forced = p.copy()
        forced[random.choice(len(sites), len(sites) // 2, replace=False)] = 1 / (1 + PERMUTATIONS)
        half += most(forced.tolist()) <= 0.05
    return {
        "correlation_low": float(between.min()),
        "correlation_high": float(between.max()),
        "one_block": single / DRAWS / len(sites),
        "none_enriched": none / DRAWS,
        "half_enriched": half / DRAWS,
    }


def main() -> None:
    """Print both models."""
    for name in ("pocket-decoder", "pocket-decoder@step64", "pocket-encoder"):
        print(name, {key: round(value, 3) for key, value in measure(name).items()})


if __name__ == "__main__":
    main()
