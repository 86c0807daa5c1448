"""The walk: documents -> token windows -> states at sites -> Clouds -> views -> metrics -> Records -> a Unit."""

import math
from dataclasses import replace
from typing import Any

from anisoscope.corpora import Corpus, load_corpus
from anisoscope.errors import ModelError, SpecError
from anisoscope.layout import select_sites
from anisoscope.metrics import find_metrics
from anisoscope.models import Model, adopt_model, embedding_rows, load_model
from anisoscope.past import Past
from anisoscope.probes import Probe
from anisoscope.records import CONTROLS, Checkpoint, Spec, Unit
from anisoscope.revisions import place_in_training, place_of
from anisoscope.running import FORWARD_TOKENS as FORWARD_TOKENS
from anisoscope.running import Run, weight_sites
from anisoscope.sources import hash_weights, is_commit, locate, split_pocket
from anisoscope.text import Windows, draw_windows


def resolve(spec: Spec, *, corpus: Corpus | None = None, model: Model | None = None) -> Spec:
    """The Spec with everything filled in that its key needs: metric versions, hashes of weights and corpus.

    Computable before a run, without loading a model, so that a stored unit is recognised.
    """
    name, revision = split_pocket(spec.model, spec.revision)
    spec = replace(spec, model=name, revision=revision)
    metrics = find_metrics(
        [item if isinstance(item, str) else item[0] for item in spec.metrics], gride_scales=spec.gride_scales
    )
    for control, shown in CONTROLS.items():
        # Units that hold gradients against the past have a part of the metrics that were asked for.
        if control in spec.controls and spec.proxy_from is None and not {item.name for item in metrics} & {*shown}:
            raise SpecError(
                f"the control {control} is about {' or '.join(shown)}: ask for it, or leave the control out"
            )
    asked = dict(item for item in spec.metrics if not isinstance(item, str))
    for metric in metrics:
        if asked.get(metric.name, metric.version) != metric.version:
            raise SpecError(
                f"the Spec asks for version {asked[metric.name]} of {metric.name}; this anisoscope computes version "
                f"{metric.version} (CHANGELOG.md says what changed)"
            )
    corpus = corpus or load_corpus(spec.corpus)
    weights = model.weights if model else _find_weights(spec)
    for what, named, found in (("weights", spec.weights, weights), ("corpus", spec.corpus_hash, corpus.hash)):
        if named not in (None, found):
            raise SpecError(f"the Spec is about {what} with hash {named}, and what is here has {found}")
    return replace(
        spec,
        weights=weights,
        step=spec.step if spec.step is not None else place_of(spec.revision).step,
        corpus=corpus.name,
        corpus_hash=corpus.hash,
        populations=tuple(dict.fromkeys(spec.populations)),
        metrics=tuple((metric.name, metric.version) for metric in metrics),
    )


def _find_weights(spec: Spec) -> str:
    if spec.weights is not None and is_commit(spec.weights) and locate(spec.model, spec.revision).repo is not None:
        # A commit never moves, whatever its branch has done since.
        return spec.weights
    return hash_weights(spec.model, revision=spec.revision)


def measure(
    spec: Spec,
    *,
    model: Any = None,
    tokenizer: Any = None,
    corpus: Corpus | None = None,
    windows: Windows | None = None,
    checkpoint: Checkpoint | None = None,
    device: str = "auto",
    device_map: Any = None,
    batch_size: int | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    progress: bool = True,
    forgiving: bool = False,
    probe: Probe | None = None,
    past: Past | None = None,
) -> Unit:
    """Run a model over text and measure its states at every site.

    `model` and `tokenizer` hand in a module of your own (or a `models.Model`); otherwise `spec.model` is loaded.
    `windows` are those of `draw`, where only some of them are to be measured.
    `checkpoint` says where in its training the model stands, where more is known than its name tells.
    `batch_size` is the number of windows in a pass through the model, forward or backward too; when memory runs out it
    is halved, and the unit says so.
    `forgiving`: a metric that raises gives NaN, with the error as its note, instead of ending the walk.
    `probe` is that of `draw_probe`, where it is known already; `past` holds tangent proxies of earlier checkpoints.
    """
    corpus = corpus or load_corpus(spec.corpus)
    spec, loaded = load(
        spec,
        corpus,
        model,
        tokenizer,
        device=device,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    if checkpoint is None:
        place = place_in_training(spec.model, spec.revision)
        checkpoint = Checkpoint(model=spec.model, revision=spec.revision, stage=place.stage, tokens=place.tokens)
    windows = windows or draw(spec, loaded, corpus)
    return Run(spec, loaded, corpus, windows, checkpoint, batch_size, forgiving, probe, past).run(progress)


def load(spec: Spec, corpus: Corpus, model: Any = None, tokenizer: Any = None, **loading: Any) -> tuple[Spec, Model]:
    """The resolved Spec and its model, loaded with the options of `load_model` where none is handed in."""
    hand: dict[str, Any] = {"blocks": spec.blocks, "final_norm": spec.final_norm}
    check_single(spec)
    if model is None:
        spec = resolve(spec, corpus=corpus)
        named = {"revision": spec.revision, "weights": spec.weights, "dtype": spec.dtype}
        return spec, load_model(spec.model, **named, **hand, **loading)
    loaded = model if isinstance(model, Model) else adopt_model(model, tokenizer, name=spec.model, **hand)
    return resolve(spec, corpus=corpus, model=loaded), loaded


def check_single(spec: Spec) -> None:
    """Refuse metrics that one set of weights cannot have."""
    for metric in find_metrics([item if isinstance(item, str) else item[0] for item in spec.metrics]):
        if metric.needs in ("updates", "movement"):
            raise SpecError(f"{metric.name} compares two checkpoints of a training: `anisoscope sweep --drift`")


def check_sites(spec: Spec, model: Model) -> None:
    """Refuse sites that the model does not have."""
    select_sites(model.layout, [pattern for pattern in spec.sites if not pattern.endswith(".weight")])
    weight_sites(spec)


def draw(spec: Spec, model: Model, corpus: Corpus) -> Windows:
    """The windows of text that a Spec is about."""
    windows = draw_windows(
        corpus,
        model.tokenizer,
        seq_len=_fitting_length(spec, model),
        count=math.ceil(spec.tokens / spec.seq_len),
        seed=spec.seed,
        special_tokens=spec.special_tokens,
    )
    rows = embedding_rows(model.module)
    if rows is not None and windows.token_ids.max() >= rows:
        largest = int(windows.token_ids.max())
        raise ModelError(f"{spec.model}: the text has token id {largest}; the embedding has {rows} rows")
    return windows


def _fitting_length(spec: Spec, model: Model) -> int:
    positions = getattr(getattr(model.module, "config", None), "max_position_embeddings", None)
    limit = min(positions or spec.seq_len, getattr(model.tokenizer, "model_max_length", None) or spec.seq_len)
    if spec.seq_len > limit:
        has = f"{spec.model} has {limit} positions"
        raise SpecError(f"seq_len (--seq-len) is {spec.seq_len}, and {has}; example: --seq-len {limit}")
    return spec.seq_len
