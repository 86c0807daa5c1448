"""Gradients of a probe's loss, token by token: at sites, at linear modules, at embedding rows; updates of a matrix.

The training is left alone: parameters are read as constants, so nothing is added to their `grad`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from anisoscope.capture import MASKED_SHARE, hooks_for, predict, windows_per_pass
from anisoscope.cloud import Tokens
from anisoscope.errors import LayoutError, ModelError, SpecError
from anisoscope.models import Model
from anisoscope.norms import Norm, read_norms
from anisoscope.passes import PassSize
from anisoscope.records import FINAL_NORM_SITES, Site
from anisoscope.taps import Key, Tap, find_linears, path_of, run_apart, tapped, widen
from anisoscope.text import Windows

Place = Site | str
"""A site, or the path of a linear module; the second call of a module that is shared is `path@1`."""
Into = Callable[[Place, slice, Tensor, Tensor], None]

# Tokens in one pass where the batch size is left to us: the graph keeps every state, and the logits three times.
_PASS_TOKENS = 2048
_NORMED, _GAINED, _ = FINAL_NORM_SITES


@dataclass(frozen=True, kw_only=True, eq=False)
class Coupled:
    """What stood at a place, token by token, and the gradients of the probe's loss that belong to it.

    At a site both are of the state. At a linear module the values are its inputs x and the gradients those of its
    outputs, δ. In float32, or in float64 where the model is.
    """

    values: Float[Tensor, "n d"]
    gradients: Float[Tensor, "n e"]

    def weight_gradient(self) -> Float[Tensor, "e d"]:
        """Σ δ xᵀ: what this call adds to the gradient of a linear module's weight (of Conv1D's, the transpose).

        At a site: the gradient of an identity map put there.
        """
        return self.gradients.T @ self.values


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingGradients:
    """Gradients of the probe's loss at embedding rows; those of a tied matrix are the sum of both parts."""

    types: Int[Tensor, " m"]
    """The token ids that the model read, ascending; the mask token is among them where it stood for another."""
    read: Float[Tensor, "m d"]
    """Through the input embedding."""
    predicted: Float[Tensor, "m e"] | None
    """Through the logits; None where the output embedding is no linear module."""
    tied: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeGradients:
    """What a forward and backward pass over a probe showed. Row i is one token everywhere; windows stand in order.

    The loss is the *sum* of the tokens' cross entropies, so that a token's gradient does not depend on how many others
    were probed; divided by `predicted`, gradients are those of the mean loss.
    """

    tokens: Tokens
    """Losses are NaN where there are none: see `capture.token_losses`."""
    windows: Int[Tensor, " n"]
    read: Int[Tensor, " n"]
    """The ids that the model was given: a masked token's is the mask."""
    predicted: int
    sites: Mapping[Site, Coupled]
    linears: Mapping[str, Coupled]
    embedding: EmbeddingGradients | None


# Tensors made in inference mode take no part in a backward pass.
@torch.inference_mode(False)
def capture_gradients(
    model: Model,
    windows: Windows,
    sites: Iterable[Site] = (),
    *,
    linears: Iterable[str] = (),
    embedding: bool = False,
    seed: int = 0,
    batch_size: int | PassSize | None = None,
    device: torch.device | str | None = None,
    upcast: bool = True,
    into: Into | None = None,
    norms: Mapping[str | None, Norm | str] | None = None,
    shuffle: int | None = None,
) -> ProbeGradients:
    """States and gradients of the probe's loss at every place asked for, from one forward and one backward pass.

    `linears` are paths of linear modules, or globs over them; `embedding` asks for the gradients of embedding rows.
    `seed` draws the positions at which a masked language model's tokens are masked, the same in every window.
    `batch_size` windows go through at a time, and fewer once memory runs out; the numbers do not depend on it.
    `upcast` runs bfloat16 and float16 weights in float32, from a copy; without it the passes round as the model does,
    and only the loss and what is kept are float32.
    Matrices are kept on `device` (by default the model's). `into` is handed each place of each pass instead, with its
    windows and its values and gradients (b, t, width), and must copy what it keeps; where memory runs out in a pass,
    it is handed the same windows again.
    `shuffle` is a seed that deals the targets anew among all positions that have one.
    """
    count, length = windows.token_ids.shape
    pass_size = batch_size if isinstance(batch_size, PassSize) else PassSize(batch_size)
    ids = torch.from_numpy(windows.token_ids)
    read, predicting = read_for_loss(model, windows, seed)
    targets = ids.roll(-1, 1) if model.head == "causal" else ids.clone()
    if shuffle is not None:
        order = torch.randperm(int(predicting.sum()), generator=torch.Generator().manual_seed(shuffle))
        targets[predicting] = targets[predicting][order]
    probe = _Probe(model, tuple(sites), tuple(linears), norms, read.unique() if embedding else None)
    kept: dict[Place, list[Tensor]] = {}
    losses: list[Tensor] = []

    def keep(place: Place, part: slice, values: Tensor, gradients: Tensor) -> None:
        if place not in kept:
            kept[place] = [one.new_empty(count, *one.shape[1:], device=device) for one in (values, gradients)]
        for room, one in zip(kept[place], (values, gradients), strict=True):
            room[part] = one

    def pass_over(part: slice) -> None:
        losses.append(probe.run(part, read[part], targets[part], predicting[part], into or keep))

    def run() -> None:
        default = windows_per_pass(model, length, _PASS_TOKENS, gradients=True)
        what = "forward and backward pass"
        pass_size.run(pass_over, stop=count, default=default, seq_len=length, what=what)

    run_apart(model.module, run, upcast=upcast)
    where = torch.device(device) if device else losses[0].device
    every = torch.cat(losses).flatten().to(where)
    pairs = {place: Coupled(values=v.flatten(0, 1), gradients=g.flatten(0, 1)) for place, (v, g) in kept.items()}
    return ProbeGradients(
        tokens=tokens_of(windows, where, every),
        windows=torch.arange(count, device=where).repeat_interleave(length),
        read=read.flatten().to(where),
        predicted=int(predicting.sum()),
        sites={place: pair for place, pair in pairs.items() if isinstance(place, Site)},
        linears={place: pair for place, pair in pairs.items() if isinstance(place, str)},
        embedding=probe.embedding_gradients(where),
    )


def read_for_loss(model: Model, windows: Windows, seed: int = 0) -> tuple[Int[Tensor, "w t"], Bool[Tensor, "w t"]]:
    """What the model is to read, and the positions that have a loss."""
    ids = torch.from_numpy(windows.token_ids)
    if model.head is None:
        raise ModelError(f"{model.name} has no language-model head: there is no loss to take gradients of")
    if model.head == "causal":
        predicting = torch.ones_like(ids, dtype=torch.bool)
        predicting[:, -1] = False
        return ids, predicting
    if getattr(model.tokenizer, "mask_token_id", None) is None:
        raise ModelError(f"{model.name} is a masked language model, and its tokenizer has no mask token")
    masked = mask_positions(torch.from_numpy(windows.special), seed)
    if not masked.any():
        raise SpecError(f"{model.name}: every token is special, and there is none to mask")
    return ids.masked_fill(masked, model.tokenizer.mask_token_id), masked


def mask_positions(special: Bool[Tensor, "w t"], seed: int) -> Bool[Tensor, "w t"]:
    """Which tokens are masked: 15 % of the positions, the same in every window; special tokens never are.

    A state tells whether it is masked, and a gradient is large because it is. With positions of its own in each window
    that alone would tell true pairs of windows from others; so masks stand where those of all other windows stand.
    Positions that hold a special token in some window come last.
    """
    order = torch.randperm(special.shape[1], generator=torch.Generator().manual_seed(seed))
    order = order[special.sum(0)[order].argsort(stable=True)]
    masked = torch.zeros_like(special)
    masked[:, order[: max(1, round(MASKED_SHARE * len(order)))]] = True
    return masked & ~special


def tokens_of(windows: Windows, device: torch.device, losses: Float[Tensor, " n"] | None = None) -> Tokens:
    """What is known of the tokens of windows, one after the other."""
    positions = np.broadcast_to(np.arange(windows.token_ids.shape[1]), windows.token_ids.shape)
    rows = {"ids": windows.token_ids, "positions": positions, "documents": windows.documents}
    rows |= {"special": windows.special, "sentences": windows.sentences}
    return Tokens(**{name: torch.from_numpy(one.flatten()).to(device) for name, one in rows.items()}, losses=losses)


class _Probe:
    """The passes over one probe: where the hooks are, and the embedding rows that add up over passes."""

    def __init__(
        self,
        model: Model,
        sites: tuple[Site, ...],
        linears: tuple[str, ...],
        norms: Mapping[str | None, Norm | str] | None,
        types: Int[Tensor, " m"] | None,
    ) -> None:
        self.model, self.types, self.linears = model, types, find_linears(model.module, linears)
        if norms is None and any(site.name in (_NORMED, _GAINED) for site in sites):
            norms = read_norms(model.module, model.layout)
        self.norms = norms or {}
        # The stages inside the final norm are seen from its output.
        self.sites = {
            site: (path, before and site.name == "embed", call)
            for (path, before), called in hooks_for(model, sites).items()
            for call, here in called.items()
            for site in here
        }
        self.table = path_of(model.module, "get_input_embeddings")
        if types is not None and not (self.table and isinstance(model.module.get_submodule(self.table), nn.Embedding)):
            raise ModelError(f"{model.name} does not say which nn.Embedding is its input embedding")
        head = path_of(model.module, "get_output_embeddings")
        self.head = head if types is not None and head in find_linears(model.module, ("*",)) else None
        # The table is always among them: whatever is made of its output then has a gradient.
        paths = dict.fromkeys(path for path in (self.table, self.head, *self.linears) if path is not None)
        places = [*(place[:2] for place in self.sites.values()), *((path, False) for path in paths)]
        self.places = tuple(dict.fromkeys(places))
        self.rows: dict[str, Tensor] = {}

    def run(
        self,
        part: slice,
        read: Int[Tensor, "b t"],
        targets: Int[Tensor, "b t"],
        predicting: Bool[Tensor, "b t"],
        into: Into,
    ) -> Float[Tensor, "b t"]:
        """One pass forward and one backward; the losses."""
        module, shape = self.model.module, tuple(read.shape)
        with tapped(module, shape, self.places) as seen:
            # Where the head itself is tapped, the gradients of all its logits are asked for.
            whole = (self.model.plain_head, False) in self.places
            predictions = predict(self.model, read, gradients=True, whole=whole)
            assert predictions is not None
            seen.complete = True
            taps = {key: tap for key, tap in seen.items() if self._wants(key)}
            predicting, targets = (one.to(predictions.rows.device) for one in (predicting, targets))
            lost = predictions.losses(predicting, targets)
            losses = lost.new_full(shape, torch.nan).masked_scatter(predicting, lost.detach())
            sources = [tap.source for tap in taps.values()]
            asked = torch.autograd.grad(lost.sum(), sources, allow_unused=True) if sources else ()
        del predictions, lost
        found = zip(taps, sources, asked, strict=True)
        gradients = {key: widen(torch.zeros_like(source) if one is None else one) for key, source, one in found}
        for place, values, gradient in self._shown(taps, gradients):
            if values.shape[:-1] != shape:
                values, gradient = (self._by_token(place, one, shape) for one in (values, gradient))
            into(place, part, widen(values), gradient)
        if self.types is not None:
            self._add_rows(taps, gradients)
        return losses

    def _wants(self, key: Key) -> bool:
        path, before, _ = key
        rows = self.types is not None and path in (self.table, self.head)
        return key in self.sites.values() or (not before and (path in self.linears or rows))

    def _shown(self, taps: dict[Key, Tap], gradients: dict[Key, Tensor]) -> Iterator[tuple[Place, Tensor, Tensor]]:
        for site, key in self.sites.items():
            if key not in taps:
                raise LayoutError(f"{self.model.name}: no state was seen at {site.name}")
            yield site, *self._at(site, taps[key], gradients[key])
        for (path, before, call), tap in taps.items():
            if path in self.linears and not before:
                yield path if call == 0 else f"{path}@{call}", tap.given, gradients[path, before, call]

    def _at(self, site: Site, tap: Tap, gradient: Tensor) -> tuple[Tensor, Tensor]:
        if site.name not in (_NORMED, _GAINED):
            return tap.source.detach(), gradient
        norm = self.norms[site.stack]
        if isinstance(norm, str):
            raise ModelError(f"{site.name}: {norm}")
        # Gain and bias come after the stage: the gradient before the bias is the one after it.
        if site.name == _GAINED:
            return norm.gained(tap.given).to(tap.source.dtype), gradient
        return norm.normalise(tap.given).to(tap.source.dtype), gradient * norm.gain.to(gradient)

    def _by_token(self, place: Place, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        if rows.ndim != 2 or len(rows) != shape[0] * shape[1]:
            raise LayoutError(
                f"{place} has no row per token: it came with {tuple(rows.shape)} for windows of {shape}. Leave it out."
            )
        return rows.view(*shape, -1)

    def _add_rows(self, taps: dict[Key, Tap], gradients: dict[Key, Tensor]) -> None:
        """Both parts of the gradient at the rows of the types that were read, in this pass."""
        assert self.types is not None
        sums = dict(self.rows)
        for (path, before, call), tap in taps.items():
            gradient = gradients[path, before, call]
            types = self.types.to(gradient.device)
            if path == self.table and not before:
                table = self.model.module.get_submodule(path)
                assert isinstance(table, nn.Embedding)
                weight = widen(table.weight.detach()).requires_grad_()
                # By the module itself: it may scale its rows, or leave one without gradient.
                made = functional_call(table, {"weight": weight}, (tap.given,))
                rows = torch.autograd.grad(made, weight, gradient)[0].to_dense()[types]
            elif path == self.head:
                rows = gradient.flatten(0, -2)[:, types].T @ widen(tap.given.flatten(0, -2))
            else:
                continue
            sums[path] = rows + sums[path] if path in sums else rows
        # At once: a pass in which memory runs out is made again.
        self.rows = sums

    def embedding_gradients(self, device: torch.device) -> EmbeddingGradients | None:
        """Over all passes."""
        if self.types is None or self.table is None:
            return None
        tables = [self.model.module.get_submodule(path) for path in (self.table, self.head) if path is not None]
        return EmbeddingGradients(
            types=self.types.to(device),
            read=self.rows[self.table].to(device),
            predicted=None if self.head is None else self.rows[self.head].to(device),
            tied=len({id(table.weight) for table in tables}) < len(tables),
        )
