"""What comes out of the model."""

from jaxtyping import Float
from torch import Tensor

from anisoscope.metrics.declaration import metric


@metric(
    family="output",
    needs="losses",
    version=1,
    cite="radford2019language",
    null="none",
    reason="a loss is compared with other losses, not with an isotropic cloud",
    populations=("all",),
    min_points=1,
    undefined="no token has a loss",
)
def loss(losses: Float[Tensor, " m"]) -> Float[Tensor, ""]:
    """Mean loss per predicted token, in nats, on text drawn from the corpus.

        loss = mean of -log p(token | context)

    Decoders: the next token. Encoders with a masked-language-model head: 15 % of the tokens, masked, in a pass of their
    own. Other models: NaN with a note. At site `output`.
    """
    return losses.double().mean()
