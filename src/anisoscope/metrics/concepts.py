"""Whether the directions of a sparse non-negative factorisation are there again in other text, and in gradients.

Notation: D (r, d) the directions of length one found in the states of the fit half, by semi-non-negative factorisation
and then the tightest cone in its span; partners are matched one to one, so that the sum of cosines is largest.
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.metrics.declaration import metric


@dataclass(frozen=True, kw_only=True)
class ConceptSet:
    """What is known of the concepts of one site; the second of each pair is what chance gives."""

    replication: Float[Tensor, " r"]
    permuted_replication: Float[Tensor, " m"]
    stability: Float[Tensor, " r"]
    permuted_stability: Float[Tensor, " q"]
    energy: float
    chance_energy: float


_of_concepts = partial(
    metric,
    family="concepts",
    needs="concepts",
    # 2: gradients of masked models, and states that concepts are looked for again in, are masked alike in every window.
    # 3: windows of the probe share no document.
    version=3,
    cite="ding2010convex",
    invariant_to="translation rotation scale",
    null="control",
    populations=("typical",),
    undefined="there are too few states, or they do not vary",
)


@_of_concepts(bounds=(-1.0, 1.0), control=lambda found: found.permuted_replication.mean())
def concept_replication(found: ConceptSet) -> Float[Tensor, ""]:
    """Whether concepts come back in other documents.

        concept_replication = mean over concepts of cos(d_i, partner of d_i among the directions of the test half)

    1 where both halves have the same directions, near 0 in noise. `null` is the same with each coordinate of the test
    half shuffled by itself: mean and spread of coordinates stay, what they say together is gone. This is the number
    that decides; `concept_stability` is necessary only. Deviation from the source (semi-NMF has no such number):
    directions are sharpened, since a factorisation by itself fixes their span at best.
    """
    return found.replication.mean()


@_of_concepts(bounds=(-1.0, 1.0), control=lambda found: found.permuted_stability.mean())
def concept_stability(found: ConceptSet) -> Float[Tensor, ""]:
    """Whether concepts come back from other random starts on the same states.

        concept_stability = mean over concepts and seeds of cos(d_i, partner of d_i in the fit from another seed)

    1 where the start does not matter. Noise has much of it too, for a sample has a shape of its own: `null` is the same
    number for states with shuffled coordinates. Deviation from the source: see `concept_replication`.
    """
    return found.stability.mean()


@_of_concepts(
    bounds=(0.0, 1.0),
    control=lambda found: torch.tensor(found.chance_energy, dtype=torch.float64),
    undefined="the gradients are zero, or there are too few states",
)
def concept_energy(found: ConceptSet) -> Float[Tensor, ""]:
    """Share of the gradients' energy in the span of the concepts.

        concept_energy = ‖A Q‖² / ‖A‖²,   Q an orthonormal basis of span(D)

    A are the activation gradients of the test half, D comes from the fit half. 1 where gradients lie in the span;
    `null` is the largest of what random subspaces of its rank (r/d), random signs of its coordinates, and the next
    principal directions hold, and `control` says which. It is `tangent_energy` of activation gradients for this proxy;
    what each concept holds by itself is attached. Deviation from the source: the factorisation is the source's, the
    number ours.
    """
    return torch.tensor(found.energy, dtype=torch.float64)
