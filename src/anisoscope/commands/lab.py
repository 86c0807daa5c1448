"""What needs no model of yours: `demo`."""

from pathlib import Path
from typing import Annotated

import typer

from anisoscope.commands.shared import Debug, app, reporting, say
from anisoscope.records import Spec


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="RUN", help="Folder to store units in.")] = Path(
        "runs/demo"
    ),
    tokens: Annotated[int, typer.Option(help="Tokens to run through each model.")] = 32768,
    debug: Debug = False,
) -> None:
    """Measure two small untrained models on Python's own documentation, offline."""
    with reporting(debug):
        from anisoscope import printing
        from anisoscope.corpora import load_corpus
        from anisoscope.lab import build_untrained
        from anisoscope.store import Store
        from anisoscope.walk import measure

        store = Store(output)
        store.check_writable()
        say("These two models are UNTRAINED: random weights. The numbers show the instrument, not language models.")
        corpus = load_corpus("pydoc")
        for kind in ("decoder", "encoder"):
            model = build_untrained(kind, corpus)
            spec = Spec(
                model=model.name, tokens=tokens, metrics=("leading_variance", "mean_cosine", "isoscore", "twonn")
            )
            unit = measure(spec, model=model.module, tokenizer=model.tokenizer, corpus=corpus)
            store.put(unit)
            printing.print_unit(unit)
        print(f"Two untrained models, stored in {output}. Now try a trained one: anisoscope measure MODEL --owners")
