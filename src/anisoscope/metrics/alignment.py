"""How much of a gradient lies where states vary, and how much more than chance would put there.

Notation: h the states of test documents, a = ∂L/∂h their gradients, Q (d, r) a tangent proxy fitted on other documents.
`virtual` is the coupled gradient G = Σ (a - ā)(h - h̄)ᵀ, that of an identity map put at the site; `activation` are the
rows a themselves. The computation is in `tangent/`; here is what is reported of it.
"""

import math
from functools import partial
from typing import NamedTuple

from anisoscope.metrics.declaration import metric


class Enrichment(NamedTuple):
    """What a gradient and a tangent proxy have in common; NaN where it is not known."""

    energy: float
    """E = ‖GQ‖² / ‖G‖², or ‖AQ‖² / ‖A‖²."""
    chance: float = math.nan
    """The same under the binding control."""
    gain: float = math.nan
    normal_ratio: float = math.nan
    leading_share: float = math.nan
    """Of the gradient rows' second moment."""
    variance_gain: float = math.nan
    signal_to_noise: float = math.nan


class Removed(NamedTuple):
    """What becomes of the gradients' anisotropy without the tangent proxy; NaN where it is not known."""

    change: float


class Trend(NamedTuple):
    """How the tangent energy of token types goes with their frequency; NaN where it is not known."""

    spearman: float


class Turned(NamedTuple):
    """From a proxy of an earlier checkpoint to the present one; NaN where it is not known."""

    distance: float
    """√Σθ² over the principal angles θ."""


_of_gradients = partial(
    metric,
    family="alignment",
    needs="enrichment",
    # 2: masked models' gradients, and the states that proxies are fitted on, are of text masked alike in every window.
    # 3: windows of the probe share no document; more controls decide, and the hardest of them gives excess and p.
    version=3,
    # Sink tokens own what `all` tokens show.
    populations=("typical",),
    cite="bernas2026revisiting",
    min_points=2,
    undefined="the gradients are zero, or the control does not exist here (too few documents, or no normal space)",
)


@_of_gradients(
    invariant_to="rotation scale",
    bounds=(0.0, 1.0),
    null="none",
    reason="its controls stand beside it: tangent_excess and normal_ratio",
)
def tangent_energy(found: Enrichment) -> float:
    """Share of a gradient's energy in the tangent proxy.

        tangent_energy = E(Q) = ‖GQ‖² / ‖G‖²        (activation: ‖AQ‖² / ‖A‖²)

    By itself it says little: a weight gradient lies where states vary whether or not there is a signal, so E is near
    the share of the states' variance in Q even for gradients drawn at random. Its interval is over windows (virtual)
    or documents (activation). Masked models are probed on masked text, at the same positions in every window.
    """
    return found.energy


@_of_gradients(
    invariant_to="rotation scale",
    null="exact",
    closed_form=lambda n, d: 1.0,
)
def tangent_gain(found: Enrichment) -> float:
    """Energy in the tangent proxy over what is expected there without a signal.

        tangent_gain = E(Q) / E under the control that decides        (activation: E(Q) / (r/d))

    At most 1 on average where gradients have nothing to do with the states they belong to; `control` names the control.
    """
    return found.gain


@_of_gradients(
    invariant_to="rotation scale",
    bounds=(-1.0, 1.0),
    null="exact",
    closed_form=lambda n, d: 0.0,
)
def tangent_excess(found: Enrichment) -> float:
    """The headline: energy in the tangent proxy beyond the hardest control that applies.

        tangent_excess = E(Q) - E under the control of the largest p, which is:

        virtual     permuted               G_π = Σ_w A_π(w)ᵀ H_w, whole windows permuted
                    permuted_directions    the same, the sizes of gradients staying with the states
                    flipped                G_s = Σ_w ±A_wᵀ H_w
        activation  haar, signs            random subspaces; random signs of Q's coordinates
                    span                   random subspaces in the span of Q and the next r principal directions
                    next                   these next directions
        both        shuffled               gradients of shuffled targets, where they were asked for

    At most 0 on average where there is no signal. p is that of the same control, so that a gradient is called tangent
    at most at the nominal rate if any one of the hypotheses behind them is true (docs/methods.md, Controls). One window
    of each document is used; NaN, and no p, with fewer than 32 documents.
    Deviation from the source: it compares with random normal directions, which on weight gradients every signal-free
    null passes (docs/tangent.md); that number is `normal_ratio`.
    """
    return found.energy - found.chance


@_of_gradients(
    invariant_to="rotation scale",
    null="none",
    reason="the source's own measure; signal-free weight gradients have large ones too",
)
def normal_ratio(found: Enrichment) -> float:
    """The source's measure: energy in the tangent proxy over the mean energy in random normal subspaces of its rank.

        normal_ratio = E(Q) / mean E(Q_N),   Q_N random with Q_NᵀQ = 0

    Shown because the source reports it, with its p, and never the headline: for coupled gradients it is large whether
    or not there is a signal. 199 random subspaces; the source has 20.
    """
    return found.normal_ratio


@_of_gradients(
    invariant_to="rotation scale",
    bounds=(0.0, 1.0),
    null="none",
    reason="gradients are compared with other checkpoints, sites and frequencies",
)
def gradient_leading_variance(found: Enrichment) -> float:
    """Leading share of the second moment of gradient rows.

        gradient_leading_variance = λ₁ / Σλ of AᵀA        (virtual: of GᵀG, whose λ are squares)

    The anisotropy of gradients: not centred, because a mean gradient is part of what training does.
    """
    return found.leading_share


@_of_gradients(
    invariant_to="rotation scale",
    null="none",
    reason="1 would be gradients that follow the states' variance, and signal-free ones come near it",
    default=False,
)
def variance_gain(found: Enrichment) -> float:
    """Energy of a coupled gradient in the tangent proxy over the share of the states' variance there.

        variance_gain = E(Q) / V(Q),   V(Q) = ‖HQ‖² / ‖H‖² of the centred test states

    What is left of `tangent_energy` once it is known where states vary: a weight gradient is a sum over states.
    """
    return found.variance_gain


@_of_gradients(
    invariant_to="rotation scale",
    bounds=(float("-inf"), float("inf")),
    null="exact",
    closed_form=lambda n, d: 0.0,
    default=False,
)
def gradient_signal_to_noise(found: Enrichment) -> float:
    """How much of a coupled gradient in the tangent proxy two halves of the windows agree on.

        gradient_signal_to_noise = ⟨G₁Q, G₂Q⟩ / ‖(G₁ - G₂)Q‖²,   each averaged over all halvings of the windows

    G₁ and G₂ are the sums over two halves. 0 on average where windows have nothing in common, and growing with the
    number of tokens where they have: an energy whose signal is far below its noise says where noise lies.
    """
    return found.signal_to_noise


@_of_gradients(
    needs="removal",
    invariant_to="rotation scale",
    null="none",
    reason="what removing random normal directions does stands beside it as its control",
)
def tangent_anisotropy_share(found: Removed) -> float:
    """How much less anisotropic gradients are without the tangent proxy.

        share=isoscore    IsoScore*(C without Q) - IsoScore*(C), in the d - r coordinates that are left
        share=leading     l₁/Σl of C, less that of PCP
        share=spectral    Σ_{j≤r} l_j ‖Qᵀv_j‖² / Σ_{j≤r} l_j
        share=energy      1 - ‖P(C - l̄I)P‖² / ‖C - l̄I‖²

    C: second moment of the gradient rows, with eigenvalues l_j and eigenvectors v_j; l̄ = tr C / d; P = I - QQᵀ. Held
    against random normal subspaces (p) and, in a row of its own, against the next r principal directions. With
    `--controls shares` the isoscore and the energy also against some of what decides for energies (p), in rows of their
    own: permuted windows for coupled gradients, uniform and sign-flipped subspaces for uncoupled ones. Of the two the
    energy shows what is planted in a coupled gradient, the isoscore hardly (docs/tangent.md). With the mean projected
    out of the proxy there are these two alone. NaN where less than 1e-5 of the gradients' energy is left.
    How the source takes them out is not known; zeros in the place of directions would lower IsoScore* by themselves.
    """
    return found.change


@_of_gradients(
    needs="trend",
    invariant_to="rotation scale",
    bounds=(-1.0, 1.0),
    null="exact",
    closed_form=lambda n, d: 0.0,
)
def tangent_frequency_trend(found: Trend) -> float:
    """Whether gradients of frequent tokens lie more in the tangent proxy.

        tangent_frequency_trend = Spearman's ρ of log f and ‖Qᵀa‖² / ‖a‖² over token types, one occurrence of each

    Frequencies are counted in other documents. p permutes log f over types: occurrences of one type are not independent
    of each other. Above 0 where the source's claim holds.
    """
    return found.spearman


@_of_gradients(
    needs="turn",
    invariant_to="rotation scale",
    null="none",
    reason="the distance of random subspaces of the same rank stands beside it as its control",
)
def subspace_distance(found: Turned) -> float:
    """How far the tangent proxy turned since an earlier checkpoint.

        subspace_distance = √Σθ²   over the r principal angles θ (Grassmann distance)

    0 for the same subspace, √r · π/2 for orthogonal ones. The variant names the earlier checkpoint: the one before
    (`rolling`), the first (`untrained`) or the early ones (`frozen`).
    """
    return found.distance


@_of_gradients(
    needs="movement",
    # 2: p is that of the control that decides, the next principal directions among them.
    version=2,
    populations=("rows",),
    invariant_to="rotation scale",
    bounds=(0.0, 1.0),
    null="none",
    reason="the hardest of its controls stands beside it, with p",
    # Of two checkpoints: `anisoscope sweep --drift`.
    default=False,
)
def update_alignment(found: Enrichment) -> float:
    """Share of what the rows of the output embedding moved that lies in the tangent proxy of the states they meet.

        update_alignment = Σ ‖Qᵀu_v‖² / Σ ‖u_v‖²,   u_v the difference of row v between two checkpoints

    Q is fitted on what the output matrix is given at the earlier checkpoint. Controls are those of uncoupled gradients:
    the hardest of random subspaces, random signs and the next principal directions. Weight decay is part of an observed
    difference; where the optimizer is known, `updates.undo_decay` takes it out. `sweep --drift`.
    """
    return found.energy
