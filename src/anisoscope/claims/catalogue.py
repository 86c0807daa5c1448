"""Every claim: what it states, the smallest effect that counts, what its test assumes and what breaks it.

docs/methods.md prints this table next to simulated rates (scripts/claim_rates.py).
"""

from dataclasses import dataclass

SHAPES, GRADIENTS, PAPER_GRADIENTS, TYPES = "shapes and trainings", "gradients", "gradients, paper's control", "types"
"""Families of claims that are corrected together."""

FAMILYWISE = (SHAPES,)
"""Families corrected by Holm. The others, whose p from permutations is never below 1/200, by false discovery rate."""

PAPER = " (the paper's control)"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim that a table can support or contradict."""

    name: str
    states: str
    """What is true where it holds."""
    smallest_effect: float
    """It holds only where the effect is beyond this; NaN where the claim has none of its own."""
    effect: str
    """What the effect is measured in."""
    replicates: str
    """What is repeated, and how many are needed."""
    assumes: str
    breaks: str
    family: str


_BATCHES = "batches are exchangeable up to pools of four that share windows"
_SEEDS = "seeds are independent, their effects about normal; common steps leave no gap"
_MODELS = "models of a kind are a sample of that kind, their effects about normal"
_BLOCKS = "blocks are independent or positively dependent; each block's p is valid under its control"
_OTHER_TEXT = "another text or window length; one pool effect shared by all batches"
_FEW = "three models or seeds that agree by chance"
_CONTROL = "a control that is no null for this gradient (section Controls)"
_PAPER_BREAKS = "no signal is needed: gradients independent of the states pass"

CLAIMS = {
    claim.name: claim
    for claim in (
        Claim(
            name="bell",
            states="the best block at depth .2 to .8 is above both end blocks, and no block outside is higher",
            smallest_effect=0.05,
            effect="leading variance",
            replicates="8 batches in 3 pools",
            assumes=_BATCHES,
            breaks=_OTHER_TEXT,
            family=SHAPES,
        ),
        Claim(
            name="flat",
            states="no two blocks differ by the smallest effect",
            smallest_effect=0.1,
            effect="leading variance",
            replicates="8 batches in 3 pools",
            assumes=_BATCHES,
            breaks=_OTHER_TEXT,
            family=SHAPES,
        ),
        Claim(
            name="decoders are bells",
            states="the peak inside is above the higher end block, averaged over decoders",
            smallest_effect=0.05,
            effect="leading variance",
            replicates="3 recipes",
            assumes=_MODELS,
            breaks=_FEW,
            family=SHAPES,
        ),
        Claim(
            name="encoders are flat",
            states="highest and lowest block differ by less than the smallest effect, averaged over encoders",
            smallest_effect=0.1,
            effect="leading variance",
            replicates="3 recipes",
            assumes=_MODELS,
            breaks=_FEW,
            family=SHAPES,
        ),
        Claim(
            name="encoders and decoders differ",
            states="the mean heights of the peak inside differ between the kinds",
            smallest_effect=0.05,
            effect="leading variance",
            replicates="3 recipes of each kind",
            assumes=_MODELS,
            breaks=_FEW,
            family=SHAPES,
        ),
        Claim(
            name="grows then stabilises",
            states="the mean over the last quarter of the training steps is above the first checkpoint, and no change "
            "in the last third of the steps reaches a quarter of that growth",
            smallest_effect=0.05,
            effect="leading variance, mean of the blocks",
            replicates="3 seeds, 5 common steps",
            assumes=_SEEDS,
            breaks="a change between two checkpoints of the last third that neither shows",
            family=SHAPES,
        ),
        Claim(
            name="rises then falls",
            states="dimension rises and then falls, after an early minimum where the series begins with a fall",
            smallest_effect=0.05,
            effect="share of the highest dimension, mean of the blocks",
            replicates="3 seeds, 5 common steps",
            assumes=_SEEDS,
            breaks="a rise or fall between two checkpoints; a peak at other steps in each seed",
            family=SHAPES,
        ),
        Claim(
            name="rows drift together",
            states="rows of the output embedding move against the mean state",
            smallest_effect=0.05,
            effect="cosine, mean over training steps",
            replicates="3 seeds, 5 common steps",
            assumes=_SEEDS,
            breaks=_FEW,
            family=SHAPES,
        ),
        Claim(
            name="centring restores isotropy",
            states="I(W) of the centred output embedding is higher at the last checkpoint",
            smallest_effect=0.05,
            effect="I(W)",
            replicates="3 seeds, 5 common steps",
            assumes=_SEEDS,
            breaks=_FEW,
            family=SHAPES,
        ),
        Claim(
            name="rare rows drift farther",
            states="rows of rare types move farther than those of frequent types",
            smallest_effect=0.05,
            effect="logarithm of the ratio, mean over training steps",
            replicates="3 seeds, 5 common steps",
            assumes=_SEEDS,
            breaks=_FEW,
            family=SHAPES,
        ),
        Claim(
            name="states move into a cone",
            states="the margin of the final states, less that with random signs, grows over the training",
            smallest_effect=0.01,
            effect="margin of unit vectors",
            replicates="3 seeds, 5 common steps",
            assumes=_SEEDS,
            breaks=_FEW,
            family=SHAPES,
        ),
        Claim(
            name="queries and keys drift",
            states="the drift of queries and keys grows from the first checkpoint to the last quarter of the steps",
            smallest_effect=0.05,
            effect="drift",
            replicates="3 seeds, 5 common steps",
            assumes=_SEEDS,
            breaks=_FEW,
            family=SHAPES,
        ),
        Claim(
            name="attention sharpens",
            states="the entropy of attention falls from the first checkpoint to the last quarter of the steps",
            smallest_effect=0.05,
            effect="entropy as a share of its maximum",
            replicates="3 seeds, 5 common steps",
            assumes=_SEEDS,
            breaks=_FEW,
            family=SHAPES,
        ),
        Claim(
            name="states become anisotropic",
            states="the mean cosine of the final states grows from the first checkpoint to the last quarter of steps",
            smallest_effect=0.05,
            effect="cosine",
            replicates="3 seeds, 5 common steps",
            assumes=_SEEDS,
            breaks=_FEW,
            family=SHAPES,
        ),
        Claim(
            name="tangent enrichment",
            states="in more than half of the blocks gradients have more energy in the tangent proxy than under the "
            "hardest control, at the last checkpoint",
            smallest_effect=0.01,
            effect="share of the gradients' energy, mean of the blocks",
            replicates="blocks of one model",
            assumes=_BLOCKS,
            breaks=_CONTROL,
            family=GRADIENTS,
        ),
        Claim(
            name=f"tangent enrichment{PAPER}",
            states="in more than half of the blocks the proxy has more energy than random normal directions",
            smallest_effect=1.0,
            effect="ratio of energies, mean of the blocks",
            replicates="blocks of one model",
            assumes=_BLOCKS,
            breaks=_PAPER_BREAKS,
            family=PAPER_GRADIENTS,
        ),
        Claim(
            name="tangent share of gradient anisotropy",
            states="in more than half of the blocks the proxy has more of the gradients' uneven energy than the "
            "hardest control, at the last checkpoint",
            smallest_effect=0.01,
            effect="share of the uneven energy, mean of the blocks",
            replicates="blocks of one model",
            assumes=_BLOCKS,
            breaks=_CONTROL,
            family=GRADIENTS,
        ),
        Claim(
            name=f"tangent share of gradient anisotropy{PAPER}",
            states="without the proxy IsoScore rises more than without random normals, in more than half of the blocks",
            smallest_effect=0.0,
            effect="IsoScore, mean of the blocks",
            replicates="blocks of one model",
            assumes=_BLOCKS,
            breaks=_PAPER_BREAKS,
            family=PAPER_GRADIENTS,
        ),
        Claim(
            name="emerges early",
            states="more than half of the blocks are enriched, and more than at step 0, within the first 30 % of the "
            "training steps",
            smallest_effect=0.01,
            effect="energy share beyond step 0, mean of the blocks",
            replicates="blocks of one model; each seed must agree",
            assumes=_BLOCKS,
            breaks=_CONTROL,
            family=GRADIENTS,
        ),
        Claim(
            name=f"emerges early{PAPER}",
            states="more than half of the blocks exceed random normals within the first 30 % of the training steps",
            smallest_effect=1.0,
            effect="ratio of energies, mean of the blocks",
            replicates="blocks of one model; each seed must agree",
            assumes=_BLOCKS,
            breaks=_PAPER_BREAKS,
            family=PAPER_GRADIENTS,
        ),
        Claim(
            name="persists",
            states="after the first enriched checkpoint at least .9 of the remaining training steps are enriched, the "
            "last checkpoint among them",
            smallest_effect=0.01,
            effect="energy share beyond step 0, mean of the blocks",
            replicates="blocks of one model; each seed must agree",
            assumes=_BLOCKS,
            breaks=_CONTROL,
            family=GRADIENTS,
        ),
        Claim(
            name=f"persists{PAPER}",
            states="the same with random normals",
            smallest_effect=1.0,
            effect="ratio of energies, mean of the blocks",
            replicates="blocks of one model; each seed must agree",
            assumes=_BLOCKS,
            breaks=_PAPER_BREAKS,
            family=PAPER_GRADIENTS,
        ),
        Claim(
            name="grows with frequency",
            states="in more than half of the blocks gradients of frequent types lie more in the tangent space",
            smallest_effect=0.05,
            effect="Spearman's correlation over types, mean of the blocks",
            replicates="blocks of one model; each seed must agree",
            assumes=_BLOCKS,
            breaks="frequency of the target, loss or position that go with the input's frequency",
            family=GRADIENTS,
        ),
        Claim(
            name="encoders and decoders differ in enrichment",
            states="the mean excess of the last checkpoints differs between the kinds",
            smallest_effect=0.01,
            effect="share of the gradients' energy",
            replicates="3 recipes of each kind, seeds averaged first",
            assumes=_MODELS,
            breaks=_FEW,
            family=GRADIENTS,
        ),
        Claim(
            name="curvature is attenuated by frequency bias",
            states="in more than half of the blocks curvature is less visible when types are sampled by frequency",
            smallest_effect=0.9,
            effect="ratio of curvature visibilities, mean of the blocks",
            replicates="blocks of one model; each seed must agree",
            assumes=f"{_BLOCKS}; the ratio's logarithm is about normal",
            breaks="clouds of more dimensions than the fitted surface",
            family=GRADIENTS,
        ),
        Claim(
            name="frequent types are pinned",
            states="in more than half of the blocks frequent types are nearer to the common centroid",
            smallest_effect=-0.1,
            effect="correlation over types, mean of the blocks",
            replicates="blocks of one model",
            assumes=_BLOCKS,
            breaks="few occurrences of rare types: their centroids scatter more",
            family=TYPES,
        ),
    )
}
