"""The three papers: claim by claim, model by model. To add one: a Paper here, and its protocol."""

import difflib

from anisoscope.errors import SpecError
from anisoscope.protocols import load_protocol
from anisoscope.reproductions.nouns import PAPER_POPULATIONS, Claimed, Followed, Paper, Reading, View

_ABSTRACT = "the abstract"
_NOTES = "readers' notes, not the paper itself"

RAZZHIGAEV2024 = Paper(
    name="razzhigaev2024",
    title="The Shape of Learning (Razzhigaev et al. 2024)",
    protocols={"print": "razzhigaev2024-print", "code": "razzhigaev2024-code"},
    models=load_protocol("razzhigaev2024-print").models,
    followed=(
        Followed(model="bigscience/bloom-3b-intermediate"),
        Followed(model="EleutherAI/pythia-2.8b"),
        Followed(model="TinyLlama/TinyLlama-1.1B-intermediate-step-*"),
    ),
    corpora=("enwik8",),
    kinds=("decoder", "encoder"),
    pocket={
        "print": {"tokens": 16384, "seq_len": 256, "batch_points": 1024},
        # As released: all points in one batch.
        "code": {"tokens": 7168, "seq_len": 112, "batch_points": 7168},
    },
    asked=({"sites": ("block.*",)},),
    claims=(
        Claimed(
            name="decoders are bells",
            predicts="anisotropy over the layers of a decoder is bell-shaped: the middle layers have the most",
            where="section 4.1, figure 1",
            views=(
                View(name="the kind", tests=("decoders are bells",)),
                View(name="each model", tests=("bell",)),
            ),
            kinds=("decoder",),
        ),
        Claimed(
            name="encoders are flat",
            predicts="anisotropy of encoders stays much the same from layer to layer",
            where="section 4.1, figure 1",
            views=(
                View(name="the kind", tests=("encoders are flat",)),
                View(name="each model", tests=("flat",)),
            ),
            kinds=("encoder",),
        ),
        Claimed(
            name="encoders and decoders differ",
            predicts="the profile of decoders differs from that of encoders",
            where="abstract, section 4.1",
            views=(View(name="the kinds", tests=("encoders and decoders differ",)),),
        ),
        Claimed(
            name="anisotropy grows, then stabilises",
            predicts="in decoders anisotropy grows with training at all layers, and then settles",
            where="section 4.2, figures 3 and 4",
            views=(View(name="each training", tests=("grows then stabilises",)),),
            kinds=("decoder",),
        ),
        Claimed(
            name="dimension rises, then falls",
            predicts="the intrinsic dimension, averaged over the layers of a decoder, rises sharply early in training "
            "and then declines",
            where="section 4.3, figure 2",
            views=(
                View(name="whole training", tests=("rises then falls",), has=("from=0",)),
                View(name="from step 1,000", tests=("rises then falls",), has=("from=1000",)),
            ),
            kinds=("decoder",),
            populations=("all", "typical", "types"),
        ),
    ),
    follows=("decoder",),
    judged={"population": ("all", "typical", "types")},
    choices="Which checkpoints of Bloom, Pythia and TinyLlama the paper took is not known: twelve are taken, evenly "
    "spaced in log step.",
    caution="Claims are those of the submission's text; the camera-ready's appendix was not at hand.",
)

MACHINA2024 = Paper(
    name="machina2024",
    title="Anisotropy is Not Inherent to Transformers (Machina and Mercer 2024)",
    protocols={"code": "machina2024"},
    models=tuple(
        name for name in load_protocol("machina2024").models if name not in load_protocol("machina2024").dynamics
    ),
    followed=tuple(
        Followed(model=name, revisions=load_protocol("machina2024").revisions)
        for name in load_protocol("machina2024").dynamics
    ),
    corpora=("enwik8",),
    kinds=("decoder",),
    asked=(
        {"metrics": (*load_protocol("machina2024").spec["metrics"], "loss")},
        {"metrics": ("query_drift", "key_drift", "attention_entropy"), "sites": ("block.*",), "tokens": 16384},
        # It needs four points a dimension, and the widest model has 5,120.
        {"metrics": ("hull_margin",), "sites": ("final_norm",), "tokens": 61440, "batch_points": 20480},
        {"metrics": ("partition_isotropy", "mean_norm"), "sites": ("embed.weight", "unembed.weight"), "tokens": 4096},
    ),
    pocket={"code": {"tokens": 16384, "seq_len": 256, "batch_points": 1024}},
    drift=True,
    claims=(
        Claimed(
            name="large Pythia models are isotropic",
            predicts="the embeddings of Pythia from 410M on are isotropic: I(W) of .73 to .82, Inter-Sim of .14",
            where=f"{_ABSTRACT}; the numbers from {_NOTES}",
            untested="it is about the sizes of one suite, and no number says from where on a space is isotropic",
            readings=(
                Reading(metric="partition_isotropy", site="unembed.weight", population="rows", variant="centred=no"),
                Reading(metric="partition_isotropy", site="embed.weight", population="rows", variant="centred=no"),
                Reading(metric="inter_similarity", site="final_norm"),
                Reading(metric="mean_cosine", site="final_norm", population="typical"),
            ),
        ),
        Claimed(
            name="not as Gao et al. 2019 theorise",
            predicts="anisotropic models do not develop as theorised: rare rows driven away, states in a cone",
            where=f"{_ABSTRACT}; which parts of the theory it denies was not at hand",
            views=(
                View(name="rare rows", tests=("rare rows drift farther",)),
                View(name="a cone", tests=("states move into a cone",)),
            ),
            negated=True,
            populations=("rows", "all"),
        ),
        Claimed(
            name="not as Biś et al. 2021 theorise",
            predicts="anisotropic models do not develop as theorised: rows of the output embedding do not drift "
            "together away from the states, and centring does not undo it",
            where=f"{_ABSTRACT}; which parts of the theory it denies was not at hand",
            views=(
                View(name="common drift", tests=("rows drift together",)),
                View(name="centring", tests=("centring restores isotropy",)),
            ),
            negated=True,
            populations=("rows",),
        ),
        Claimed(
            name="anisotropy is not inherent",
            predicts="training a transformer on language does not make its states anisotropic by itself: there are "
            "models whose states stay isotropic",
            where=_ABSTRACT,
            views=(View(name="each training", tests=("states become anisotropic",)),),
            negated=True,
            existential=True,
        ),
        Claimed(
            name="the final norm is optimised for isotropy",
            predicts="large Pythia models keep the final norm's bias short, by itself and against its gain, and states "
            "are more isotropic after that norm than before it",
            where=f"{_ABSTRACT}; the indicators from {_NOTES}",
            untested="there is no test of it yet: the numbers stand here, and `anisoscope measure MODEL --metrics "
            "final_norm` shows them stage by stage",
            readings=(
                Reading(metric="norm_bias", site="final_norm"),
                Reading(metric="norm_bias_ratio", site="final_norm"),
                Reading(metric="mean_cosine", site="last", population="typical"),
                Reading(metric="mean_cosine", site="final_norm", population="typical"),
            ),
        ),
        Claimed(
            name="isotropy goes with performance",
            predicts="over the checkpoints of Pythia-70M isotropy and downstream performance have a correlation of .99",
            where=_NOTES,
            untested="a run holds no downstream scores; with a CSV of them: anisoscope claims RUN --correlate "
            "'isoscore[final_norm,typical]' --against scores.csv:accuracy",
        ),
    ),
    caution="The full text was not at hand: models, checkpoints and formulas are those of the released code and the "
    "abstract.",
)

_OURS, _THEIRS = "our control", "the paper's control"
_BEYOND = "Enriched means: more than the untrained model."
_WEAK = "Gradients without any signal pass this control too (docs/tangent.md), so it decides little."


def _both_controls(test: str, remark: str = "") -> tuple[View, ...]:
    theirs = f"{test} (the paper's control)"
    return (
        View(name=_OURS, tests=(test,), has=("virtual",), lacks="fit=", remark=remark),
        View(name=_THEIRS, tests=(theirs,), has=("virtual",), lacks="fit=", remark=_WEAK),
    )


_UNTRAINED = "Untrained models can pass it too, since state and gradient both depend on the token."
_NO_TEST = "anisoscope has no test of it yet, or too little was measured in this run"

BERNAS2026 = Paper(
    name="bernas2026",
    title="Revisiting Anisotropy in Language Transformers (Bernas et al. 2026), reconstructed",
    protocols={"reconstructed": "bernas2026"},
    models=(),
    followed=tuple(Followed(model=name) for name in load_protocol("bernas2026").dynamics),
    # C4, Wikipedia, FineWeb, arXiv and French Wikipedia, by readers' notes; which copies of them is our choice.
    corpora=(
        "hf:NeelNanda/c4-10k",
        "hf:wikimedia/wikipedia@20231101.en",
        "hf:HuggingFaceFW/fineweb@sample-10BT",
        "hf:ccdv/arxiv-summarization@document:train:article",
        "hf:wikimedia/wikipedia@20231101.fr",
    ),
    kinds=("decoder", "encoder"),
    asked=({"sites": ("block.*",)},),
    asked_last=(
        {"sites": ("block.*",), "metrics": ("pinning", "curvature"), "populations": ("content",), "controls": ()},
    ),
    pocket={
        "reconstructed": {
            "tokens": 10240,
            "seq_len": 128,
            "batch_points": 1024,
            "sites": ("block.0", "block.2", "block.5"),
        }
    },
    follow=True,
    judged={
        "population": ("all", "typical", "content", "types"),
        "proxy": ("pca",),
        "variant": ("mean=in", "mean=in;fit=frozen", "mean=in;share=isoscore", "mean=in;share=energy"),
    },
    choices="Twelve checkpoints of each model, evenly spaced in log step: which ones the paper took is not known.",
    claims=(
        Claimed(
            name="tangent enrichment",
            predicts="directions fitted to the activations capture unusually much of the gradients' energy, more than "
            "normal directions of the same rank",
            where=_ABSTRACT,
            views=(
                *_both_controls("tangent enrichment", f"{_UNTRAINED} “Emerges early” asks for more than they have."),
                View(name="our control, early proxy", tests=("tangent enrichment",), has=("virtual", "fit=frozen")),
                View(
                    name="the paper's control, early proxy",
                    tests=("tangent enrichment (the paper's control)",),
                    has=("virtual", "fit=frozen"),
                    remark=_WEAK,
                ),
            ),
        ),
        Claimed(
            name="share of gradient anisotropy",
            predicts="those directions hold a much larger share of the gradients' anisotropy than normal ones do",
            where=f"{_ABSTRACT}; by IsoScore* on removal, from {_NOTES}",
            views=_both_controls("tangent share of gradient anisotropy", _UNTRAINED),
            untested="it was compared with random normals only: harder controls need --controls shares",
            readings=(
                Reading(metric="tangent_anisotropy_share", site="last", variant="mean=in;share=isoscore"),
                Reading(
                    metric="tangent_anisotropy_share",
                    site="last",
                    population="typical",
                    variant="mean=in;share=isoscore",
                ),
            ),
        ),
        Claimed(
            name="emerges early",
            predicts="the alignment is there early in training",
            where="a public summary, not the paper itself",
            views=_both_controls("emerges early", _BEYOND),
            untested=_NO_TEST,
        ),
        Claimed(
            name="persists",
            predicts="the alignment stays, weaker late in training",
            where=f"a public summary; the weakening from {_NOTES}",
            views=_both_controls("persists", _BEYOND),
            untested=_NO_TEST,
        ),
        Claimed(
            name="grows with frequency",
            predicts="frequent tokens show the strongest enrichment",
            where="a public summary, not the paper itself",
            views=(View(name="", tests=("grows with frequency",)),),
            untested=_NO_TEST,
            populations=(*PAPER_POPULATIONS, "types"),
        ),
        Claimed(
            name="encoder and decoder differ",
            predicts="the effect is strong in decoders and weaker in encoders of EuroBERT's kind",
            where=_NOTES,
            views=(View(name="", tests=("encoders and decoders differ in enrichment",)),),
            untested="it takes three encoders and three decoders",
        ),
        Claimed(
            name="curvature is attenuated by frequency bias",
            predicts="sampling by frequency hides the curvature of the states",
            where=f"{_ABSTRACT}; derived, and argued to be at work",
            views=(View(name="", tests=("curvature is attenuated by frequency bias",)),),
            untested="`frequency_attenuation` was not measured in this run",
            populations=("content",),
        ),
        Claimed(
            name="frequent types are pinned",
            predicts="log frequency and distance to the centroid have a correlation near -.5 in decoders, a weaker one "
            "in EuroBERT",
            where=_NOTES,
            views=(View(name="", tests=("frequent types are pinned",)),),
            untested="`centroid_distance` was not measured in this run",
            populations=("content",),
            readings=(
                Reading(metric="centroid_distance", site="last", population="content"),
                Reading(metric="type_dispersion", site="last", population="content"),
            ),
        ),
    ),
    caution="RECONSTRUCTED: the full text was not at hand. Definitions, models and corpora come from the abstract and "
    "from readers' notes, and every other choice is ours (src/anisoscope/protocols/bernas2026.toml names each).",
)

PAPERS = {paper.name: paper for paper in (RAZZHIGAEV2024, MACHINA2024, BERNAS2026)}


def find_paper(name: str) -> Paper:
    """A paper by its name."""
    if name not in PAPERS:
        close = difflib.get_close_matches(name, PAPERS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(PAPERS)}"
        raise SpecError(f"unknown paper {name!r}; {hint}")
    return PAPERS[name]
