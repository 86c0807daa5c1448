"""How far the convex hull of points lies from the origin, with a proof."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

# Relative distance of the two bounds at which the search stops; 1e-4 is promised.
HULL_TOLERANCE = 1e-6
# Hulls of unit vectors that come as near to the origin as this are said to hold it.
HULL_INSIDE = 1e-4
HULL_STEPS = 100_000
# Steps after which the weights are solved for: where the hull passes close to the origin, steps alone take forever.
CORRECT_EVERY = 20


def hull_distance(units: Float[Tensor, "n d"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Bounds on the distance from the origin to the convex hull of unit vectors, in float64.

    For x = Σ wᵢuᵢ in the hull, every point y of the hull has x·y ≥ minᵢ x·uᵢ, so

        minᵢ x·uᵢ / ‖x‖ ≤ distance ≤ ‖x‖,

    and ‖x‖² - minᵢ x·uᵢ is the duality gap of Frank and Wolfe. Pairwise steps (Lacoste-Julien and Jaggi 2015): weight
    goes from the point of largest x·u that has any to the point of smallest x·u, as much as shortens x most. Now and
    then the weights of all points that have any are solved for at once (Wolfe 1976). All products are made once, so a
    step costs O(n). It stops when the bounds meet to HULL_TOLERANCE or ‖x‖ is below HULL_INSIDE; they hold wherever it
    stops.
    """
    exact = units.double()
    products = (exact @ exact.T).cpu().numpy()
    weights = np.zeros(len(products))
    weights[np.argmax(products.sum(0))] = 1.0
    along = products @ weights
    for number in range(1, HULL_STEPS + 1):
        if number % CORRECT_EVERY == 0:
            weights = _correct(products, weights)
            along = products @ weights
        square = float(weights @ along)
        low, high = int(np.argmin(along)), int(np.argmax(np.where(weights > 0, along, -np.inf)))
        if square <= HULL_INSIDE**2 or not along[low] < (1 - HULL_TOLERANCE) * square:
            break
        bend = 2 * (1 - products[low, high])
        step = min((along[high] - along[low]) / bend, weights[high]) if bend > 0 else weights[high]
        weights[low] += step
        weights[high] = weights[high] - step if step < weights[high] else 0.0
        along += step * (products[low] - products[high])
    nearest = torch.from_numpy(weights).to(exact.device) @ exact
    norm = torch.linalg.vector_norm(nearest)
    return (exact @ nearest).min() / norm.clamp_min(torch.finfo(norm.dtype).tiny), norm


def _correct(products: Float[np.ndarray, "n n"], weights: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """The shortest combination of the points that have weight; those it would give none lose theirs on the way there.

    The affine combination of least norm has weights along (G + 11ᵀ)⁻¹ 1, G the products. Never longer than before.
    """
    weights = weights.copy()
    while True:
        held = np.flatnonzero(weights)
        # So little on the diagonal as to make points that depend on each other solvable, and no more.
        system = products[np.ix_(held, held)] + 1 + 1e-12 * np.eye(len(held))
        # By torch, whose threads are the caller's to set.
        wanted = torch.linalg.solve(torch.from_numpy(system), torch.ones(len(held), dtype=torch.float64)).numpy()
        if not 0 < wanted.sum() < np.inf:
            return weights
        wanted /= wanted.sum()
        losing = wanted <= 0
        if not losing.any():
            weights[held] = wanted
            return weights
        reach = np.full(len(held), np.inf)
        reach[losing] = weights[held][losing] / (weights[held][losing] - wanted[losing])
        share = reach.min()
        moved = (1 - share) * weights[held] + share * wanted
        weights[held] = np.where(reach <= share, 0.0, np.maximum(moved, 0.0))
        weights /= weights.sum()
