"""Draw the figures of the documentation from the stored runs of this repository: python scripts/make_figures.py

Runs: docs/runs/large (two trainings of 250 M tokens, 12 blocks x 512, measured live), docs/runs/pocket (six small ones,
measured live), docs/runs/pocket-sites (the two pocket models at every site, with owners, embedding matrices and several
window lengths), docs/runs/pocket-alignment and docs/runs/pocket-alignment-encoder (gradients of two trainings),
docs/runs/pocket-shuffled (of both, and those of shuffled targets), docs/runs/pocket-gradients (gradients of twelve),
docs/runs/large-gradients (of two larger ones), docs/runs/pocket-concepts, docs/runs/pocket-curvature (one training) and
docs/runs/pocket-curvature-encoder (one of the twelve). All but the first two were made with

    for model in pocket-decoder pocket-encoder:
        anisoscope measure MODEL --tokens 16384 --seq-len 256 -o docs/runs/pocket-sites --owners
                           --metrics anisotropy,isotropy,intrinsic_dimension,final_norm,loss
        anisoscope measure MODEL --tokens 8192 --seq-len 256 -o docs/runs/pocket-sites
                           --metrics leading_variance,mean_cosine --sites embed.weight,unembed.weight
        for length in 16 32 64 128:
            anisoscope measure MODEL --tokens 16384 --seq-len LENGTH -o docs/runs/pocket-sites
                               --metrics leading_variance --sites 'block.*'
    for step in 0 16 64 256 1024 4096:
        anisoscope measure pocket-decoder@stepSTEP --tokens 8192 --seq-len 128 -o docs/runs/pocket-alignment
                           --metrics alignment,loss --populations all --sites 'block.*'
        the same with pocket-encoder and docs/runs/pocket-alignment-encoder
        anisoscope measure pocket-KIND@stepSTEP --tokens 8192 --seq-len 128 -o docs/runs/pocket-shuffled
                           --metrics tangent_energy,tangent_excess,normal_ratio --populations typical --sites 'block.*'
                           --controls shuffled_targets
        (all three without their attachments)
    for kind, layout in (decoder, gpt_neox), (encoder, eurobert); exponent in 1.0, 0.5; seed in 0, 1, 2:
        anisoscope train --corpus enwik8 --kind KIND --layout LAYOUT --layers 6 --width 112 --heads 7 --vocabulary 2048
                         --seq-len 256 --batch-size 8 --steps 768 --learning-rate 2e-3 --warmup 50 --checkpoints 13
                         --watch none --sampling-exponent EXPONENT --seed SEED -o pocket-KIND-aEXPONENT-seedSEED
        anisoscope sweep pocket-KIND-aEXPONENT-seedSEED --corpus heldout:enwik8 --follow -o docs/runs/pocket-gradients
                         --metrics alignment,pinning,leading_variance,loss --populations typical --sites 'block.*'
                         --tokens 8192 --seq-len 128 --batch-points 2048
        the same with --metrics tangent_anisotropy_share --controls shares, without --follow and --batch-points, and
        docs/runs/pocket-shares, which has no figures
        (without its attachments)
    for kind, layout in (decoder, gpt_neox), (encoder, eurobert):
        anisoscope train --corpus enwik8 --kind KIND --layout LAYOUT --layers 12 --width 512 --heads 8 --vocabulary 8192
                         --seq-len 512 --batch-size 128 --steps 3816 --learning-rate 1e-3 --warmup 200 --compile
                         --checkpoints 14 --watch none -o large-KIND
        anisoscope sweep large-KIND --corpus heldout:enwik8 --follow -o docs/runs/large-gradients
                         --metrics alignment,pinning,leading_variance,loss --populations typical
                         --sites 'block.*,final_norm' --tokens 16384 --seq-len 128
        the same with --metrics tangent_anisotropy_share --controls shares --sites 'block.*', without --follow, and
        docs/runs/large-shares, which has no figures
        (without its attachments)
    anisoscope sweep pocket-decoder --corpus enwik8 --metrics concepts --sites block.3 --tokens 8192 --seq-len 128
                     -o docs/runs/pocket-concepts
    anisoscope sweep pocket-decoder --corpus enwik8 --metrics curvature --populations content --tokens 32768
                     --sites block.0,block.2,block.5 --seq-len 128 -o docs/runs/pocket-curvature
    anisoscope measure pocket-encoder-a1.0-seed2 --revision checkpoint-768 --corpus heldout:enwik8
                       --metrics curvature,concepts --populations content --sites block.0,block.2,block.5
                       --tokens 16384 --seq-len 128 -o docs/runs/pocket-curvature-encoder
"""

import argparse
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from PIL import Image

from anisoscope import figures
from anisoscope.claims import judge
from anisoscope.store import Store

DOCS = Path(__file__).parent.parent / "docs"
# Of the catalogue of each run, what the documentation shows.
SHOWN = {
    "pocket": (
        "profile-leading_variance",
        "profile-twonn",
        "dynamics-leading_variance",
        "dynamics-twonn",
        "steps-leading_variance-pocket-decoder-seed0",
        "heatmap-leading_variance-pocket-encoder-seed0",
        "populations-leading_variance-pocket-encoder-seed0",
        "verdicts-1",
    ),
    "pocket-sites": (
        "stages-all",
        "scales-pocket-decoder",
        "lengths-leading_variance",
        "owners-pocket-encoder-step4096",
        "embeddings-unembed.weight-pocket-decoder-step4096",
    ),
    "pocket-alignment": ("alignment-pocket-decoder-pydoc-all-mean-in",),
    "pocket-alignment-encoder": ("alignment-pocket-encoder-pydoc-all-mean-in",),
    "pocket-shuffled": (
        "alignment-pocket-decoder-pydoc-typical-mean-in",
        "alignment-pocket-encoder-pydoc-typical-mean-in",
    ),
    "pocket-gradients": (
        "alignment-pocket-decoder-a1.0-seed0-heldout-enwik8-typical-mean-in",
        "alignment-pocket-encoder-a1.0-seed0-heldout-enwik8-typical-mean-in",
        "alignment_bins-pocket-decoder-a1.0-seed0-heldout-enwik8-typical",
        "alignment_bins-pocket-encoder-a1.0-seed0-heldout-enwik8-typical",
    ),
    "large-gradients": (
        "alignment-large-decoder-heldout-enwik8-typical-mean-in",
        "alignment-large-decoder-heldout-enwik8-typical-mean-in-fit-rolling",
        "alignment-large-encoder-heldout-enwik8-typical-mean-in",
        "alignment_bins-large-encoder-heldout-enwik8-typical",
        "dynamics-centroid_distance",
    ),
    "pocket-concepts": ("concepts-pocket-decoder-block.3",),
    "pocket-curvature": ("curvature-enwik8-content",),
    "pocket-curvature-encoder": ("curvature-heldout-enwik8-content",),
    "large": (
        "dynamics-leading_variance",
        "dynamics-mean_cosine",
        "dynamics-twonn",
        "profile-leading_variance",
        "profile-mean_cosine",
        "profile-twonn",
        "heatmap-leading_variance-large-decoder",
        "heatmap-leading_variance-large-encoder",
        "heatmap-mean_cosine-large-decoder",
        "steps-twonn-large-decoder",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the figures of the documentation.")
    parser.add_argument("-o", "--out", type=Path, default=DOCS / "figures")
    parser.add_argument("--format", choices=figures.FORMATS, default="png")
    parser.add_argument("--run", action="append", choices=SHOWN, help="Only the figures of this run; may be repeated.")
    arguments = parser.parse_args()
    for run, figure in find_figures(arguments.run or SHOWN):
        begun = time.perf_counter()
        path = figures.save(figure.draw(), arguments.out / f"{file_name(run, figure.name)}.{arguments.format}")
        if arguments.format == "png":
            shrink(path)
        print(f"{path}  {time.perf_counter() - begun:.1f} s  {run}: {figure.caption}")


def file_name(run: str, figure: str) -> str:
    """The large models' profile is not to overwrite the pocket models' one."""
    return f"large-{figure}" if run.startswith("large") and "large" not in figure else figure


def shrink(path: Path) -> None:
    """Pictures of few colours, kept in a repository: a palette does, at a tenth of the size."""
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def find_figures(runs: Iterable[str] = tuple(SHOWN)) -> Iterator[tuple[str, figures.Figure]]:
    """The figures shown, each with the name of its run; refused where a run no longer has one."""
    for run in runs:
        wanted, store = SHOWN[run], Store(DOCS / "runs" / run)
        table, attached = store.table(), run in ("pocket-sites", "pocket-concepts")
        units = [store.get(key) for key in sorted(store.keys())] if attached else []
        found = figures.catalogue(table, units=units, verdicts=judge(table) if run == "pocket" else ())
        there = {figure.name: figure for figure in found if figure.error is None}
        if missing := [name for name in wanted if name not in there]:
            raise SystemExit(f"{run} has no figure {', '.join(missing)}; it has {', '.join(there)}")
        yield from ((run, there[name]) for name in wanted)


if __name__ == "__main__":
    main()
