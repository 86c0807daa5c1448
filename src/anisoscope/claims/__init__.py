"""The papers' findings as tests with an effect, an interval and p, on blocks only.

    bell                           the best block at depth .2 to .8 is more than .05 above both end blocks
    flat                           no two blocks differ by .1
    decoders are bells, encoders are flat, encoders and decoders differ    the same over models
    grows then stabilises          leading variance over a training, averaged over blocks
    rises then falls               intrinsic dimension over a training, averaged over blocks
    rows drift together, ...       what older theories predict of a training (theories.py)
    tangent enrichment             gradients lie in the tangent space: by our control, and by the paper's
    tangent share of gradient anisotropy   their uneven energy lies there: by our control; by the paper's, without the
                                   tangent space they are more isotropic
    frequent types are pinned      the more frequent a token type, the nearer its centroid to the common centre

catalogue.py has what each claim states, assumes and requires. `embed` and `final_norm` are left out: with them any
profile is a bell. Replicates decide what can be claimed: batches for one model at its last checkpoint, recipes for a
kind, seeds for a training. Where too few were measured the verdict is inconclusive, with the reason. Suspect
checkpoints are left out.
"""

from anisoscope.claims.catalogue import CLAIMS as CLAIMS
from anisoscope.claims.catalogue import Claim as Claim
from anisoscope.claims.correlations import Correlation as Correlation
from anisoscope.claims.correlations import correlate_table as correlate_table
from anisoscope.claims.verdicts import Verdict as Verdict
from anisoscope.claims.verdicts import headlines as headlines
from anisoscope.claims.verdicts import judge as judge

__all__ = ["CLAIMS", "Claim", "Correlation", "Verdict", "correlate_table", "headlines", "judge"]
