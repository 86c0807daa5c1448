"""Gradients in tangent spaces of their own tokens."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.errors import SpecError
from anisoscope.kernels.gram import for_products, power_of_two_scale, working_dtype
from anisoscope.tangent.controls import DRAWS
from anisoscope.tangent.energies import Alignment, drawn_controls
from anisoscope.tangent.inference import draw_permutations, ratio_of_sums
from anisoscope.tangent.proxies import LocalProxy
from anisoscope.tangent.windows import choose_windows, place_in_windows, stack_windows


def local_alignment(
    states: Float[Tensor, "n d"],
    gradients: Float[Tensor, "n d"],
    windows: Int[Tensor, " n"],
    proxy: LocalProxy,
    *,
    keep: Bool[Tensor, " n"] | None = None,
    documents: Int[Tensor, " n"] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Alignment:
    """E = Σ ‖Qᵢᵀaᵢ‖² / Σ ‖aᵢ‖², against gradients permuted between windows: another token's tangent space.

    One window of each document, where `documents` are given: see `pair_each`.
    Permutations add up tables of windows by windows: the energy of the gradients of one in the spaces of another, and
    all the energy that meets a space. Tokens that are not kept keep their place: they have neither space nor gradient,
    and whom they meet counts in neither sum.
    """
    if proxy.dim != states.shape[1]:
        raise SpecError(f"a proxy of {proxy.dim} coordinates cannot hold states of {states.shape[1]}")
    keep = torch.ones(len(states), dtype=torch.bool, device=states.device) if keep is None else keep
    chosen, note = choose_windows(windows, windows if documents is None else documents)
    if chosen is not None and note is not None:
        rows = torch.isin(windows, windows.unique()[chosen.to(windows.device)])
        states, gradients, windows, keep = states[rows], gradients[rows], windows[rows], keep[rows]
    raw = gradients.to(working_dtype(gradients.dtype))
    raw = torch.where(keep[:, None], raw, 0)
    raw = for_products(raw / power_of_two_scale(raw).to(raw.dtype))
    shaped = stack_windows([raw[None]], windows)[0][0]
    squares, count = shaped.double().square().sum(2), len(shaped)
    window, position = (one[keep] for one in place_in_windows(windows))
    inside, met = torch.zeros(2, count, count, dtype=torch.float64, device=raw.device)
    for part, bases in proxy.bases(states[keep]):
        # Of all windows the gradient at the token's position, in the token's space.
        seen = shaped[:, position[part]].transpose(0, 1) @ bases.to(raw)
        inside.index_add_(0, window[part], seen.double().square().sum(2))
        met.index_add_(0, window[part], squares[:, position[part]].T)
    energy = ratio_of_sums(inside.diagonal(), met.diagonal(), seed=seed)
    enough = chosen is not None and float(squares.sum()) > 0
    permutations = draw_permutations(draws if enough else 0, count, seed).orders.to(raw.device)
    above, below = (one[torch.arange(count, device=raw.device), permutations].sum(1) for one in (inside, met))
    permuted = (above / below).cpu()
    control = drawn_controls([energy], permuted[None])[0]
    chance = control.value
    return Alignment(
        energy=energy,
        gain=energy.value / chance if chance else math.nan,
        excess=energy.value - chance,
        control="permuted",
        p=control.p,
        normal_ratio=math.nan,
        normal_p=math.nan,
        variance_gain=math.nan,
        signal_to_noise=math.nan,
        controls={"permuted": control},
        rank=proxy.rank,
        dim=proxy.dim,
        note="the gradients are zero" if math.isnan(energy.value) else note,
    )
