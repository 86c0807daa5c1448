"""What a run rests on: the papers of its estimators, its protocol and its models, and anisoscope itself. No torch.

`references.bib` holds the entries. Which paper an estimator cites stands in its declaration, which needs torch to be
read; `data/cites.json` holds the same, made by `make docs` and compared by a test.
"""

import functools
import importlib.resources
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pyarrow as pa
import pyarrow.compute as pc

from anisoscope import __version__
from anisoscope.errors import SpecError, StoreError
from anisoscope.inputs import read_text
from anisoscope.protocols import load_protocol
from anisoscope.store import Store

ITSELF = "anisoscope"
FORMATS = ("bibtex", "text")
REPRODUCTION = "reproduction.json"
"""In a run folder: which paper it reproduces."""

# The first pattern that fits; hub names, and names of local copies that end like them.
MODELS: dict[str, str] = {
    "*pythia*": "biderman2023pythia",
    "*bloom*": "workshop2022bloom",
    "*tinyllama*": "zhang2024tinyllama",
    "*llama-2*": "touvron2023llama",
    "*smollm2*": "allal2025smollm2",
    "*eurobert*": "boizard2025eurobert",
    "*moderncamembert*": "antoun2025modernbert",
    "*gaperon*": "godey2025gaperon",
    "*multiberts*": "sellam2022multiberts",
    "roberta-*": "liu2019roberta",
    "*/roberta-*": "liu2019roberta",
    "*albert*": "lan2020albert",
    "google-bert/*": "devlin2019bert",
    "*gpt-neox*": "black2022gptneox",
    "*gpt-j*": "wang2021gptj",
    "*gpt2*": "radford2019language",
    "*falcon-[0-9]*b*": "almazrouei2023falcon",
    "allenai/olmo-1b*": "groeneveld2024olmo",
    "llm360/amber*": "liu2023llm360",
    "facebook/opt-*": "zhang2022opt",
}
CORPORA = {"enwik8": "mahoney2011large", "heldout:enwik8": "mahoney2011large"}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One entry, and what in the run it is for."""

    key: str
    bibtex: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Bibliography:
    """What a run rests on."""

    references: tuple[Reference, ...]
    unknown: tuple[str, ...]
    """Estimators and models that no entry is known for."""


def cite_run(store: Store) -> Bibliography:
    """Everything to be cited for the numbers of a run."""
    table = store.table()
    if not table.num_rows:
        raise StoreError(f"{store.folder} holds no finished unit: nothing was computed that could be cited")
    reasons: dict[str, list[str]] = {}
    unknown: list[str] = []
    for name in _names(table, "metric"):
        _note(reasons, unknown, _cite_of(name), name)
    protocol = _protocol_of(store)
    if protocol is not None:
        _note(reasons, unknown, load_protocol(protocol).cite, f"protocol {protocol}")
    for name in _names(table, "model"):
        if not _is_ours(name):
            _note(reasons, unknown, _look_up(MODELS, name), name)
    for name in _names(table, "corpus"):
        if name in CORPORA:
            _note(reasons, unknown, CORPORA[name], name)
    entries = read_references()
    found = [Reference(key=ITSELF, bibtex=_itself(), reasons=("the instrument",))]
    found += [Reference(key=key, bibtex=entries[key], reasons=tuple(why)) for key, why in reasons.items()]
    return Bibliography(references=tuple(found), unknown=tuple(unknown))


def _note(reasons: dict[str, list[str]], unknown: list[str], key: str | None, what: str) -> None:
    if key is None:
        unknown.append(what)
    else:
        reasons.setdefault(key, []).append(what)


def _names(table: pa.Table, column: str) -> list[str]:
    return sorted(pc.unique(table[column]).to_pylist())  # pyright: ignore[reportAttributeAccessIssue]


def _is_ours(model: str) -> bool:
    """Models of the package and of the lab rest on no paper."""
    last = model.rstrip("/").rpartition("/")[2]
    return model.startswith("pocket-") or re.fullmatch(r"small-(de|en)coder-seed\d+", last) is not None


def _protocol_of(store: Store) -> str | None:
    path = store.folder / REPRODUCTION
    if not path.exists():
        return None
    try:
        return str(json.loads(read_text(path, at_most=1 << 20, error=StoreError))["protocol"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StoreError(f"{path} does not name a protocol ({error!r}); delete it, or run `reproduce` again") from error


@functools.cache
def metric_cites() -> Mapping[str, str]:
    """Estimator -> key of the paper that its declaration names."""
    return json.loads(_data("data/cites.json"))


def _cite_of(metric: str) -> str | None:
    # Every scale of GRIDE is one estimator.
    return metric_cites().get(metric) or metric_cites().get(re.sub(r"^gride_\d+$", "gride_2", metric))


def _look_up(table: Mapping[str, str], name: str) -> str | None:
    return next((key for pattern, key in table.items() if fnmatchcase(name.lower(), pattern)), None)


@functools.cache
def read_references() -> Mapping[str, str]:
    """Key -> entry, as references.bib has them."""
    text = _data("references.bib")
    starts = [match.start() for match in re.finditer(r"^@", text, re.MULTILINE)]
    entries = (text[start:stop].strip() for start, stop in zip(starts, [*starts[1:], len(text)], strict=True))
    return {re.match(r"@\w+\{([^,\s]+)", entry)[1]: entry for entry in entries}  # pyright: ignore[reportOptionalSubscript]


def _data(name: str) -> str:
    return importlib.resources.files("anisoscope").joinpath(name).read_text("utf-8")


def _itself() -> str:
    lines = ["title = {anisoscope}", "author = {{The anisoscope authors}}", f"version = {{{__version__}}}"]
    return f"@software{{{ITSELF},\n  " + ",\n  ".join(lines) + "\n}"


def as_bibtex(bibliography: Bibliography) -> str:
    """Entries for a .bib file; what each is for stands above it as a comment."""
    parts = [f"% {'; '.join(one.reasons)}\n{one.bibtex}" for one in bibliography.references]
    parts += [f"% no reference known: {', '.join(bibliography.unknown)}"] if bibliography.unknown else []
    return "\n\n".join(parts)


def as_text(bibliography: Bibliography) -> str:
    """A list to read, one reference a line, with what it is for."""
    lines = [f"{_sentence(one)}  [{', '.join(one.reasons)}]" for one in bibliography.references]
    lines += [f"No reference known: {', '.join(bibliography.unknown)}."] if bibliography.unknown else []
    return "\n".join(lines)


def _sentence(one: Reference) -> str:
    fields = dict(re.findall(r"^\s*(\w+) = \{(.*?)\},?$", one.bibtex, re.MULTILINE))
    known = ("journal", "booktitle", "series", "institution", "howpublished")
    where = next((fields[name] for name in known if name in fields), "").replace("\\url", "")
    arxiv = f"arXiv:{fields['eprint']}" if "eprint" in fields else ""
    version = f"version {fields['version']}" if "version" in fields else ""
    parts = [_authors(fields.get("author", "")), fields.get("year", ""), fields.get("title", ""), where, arxiv, version]
    return ". ".join(_plain(part) for part in parts if part) + "."


def _authors(names: str) -> str:
    listed = [_plain(name.partition(",")[0]) for name in names.split(" and ")]
    return (
        listed[0]
        if len(listed) == 1
        else f"{listed[0]} and {listed[1]}"
        if len(listed) == 2 and listed[1] != "others"
        else f"{listed[0]} et al"
    )


_ACCENTS = {"'": "\u0301", "`": "\u0300", "^": "\u0302", '"': "\u0308", "~": "\u0303"}


def _plain(text: str) -> str:
    """Without what only TeX reads."""
    import unicodedata

    accented = re.sub(r"\{?\\(['`^\"~])\{?(\w)\}?\}?", lambda found: found[2] + _ACCENTS[found[1]], text)
    return unicodedata.normalize("NFC", re.sub(r"[{}]", "", accented)).replace("--", "–")


def check_format(name: str) -> None:
    """Refuse what there is not."""
    if name not in FORMATS:
        raise SpecError(f"--format is bibtex or text; came {name!r}")


def cites_json(cites: Iterable[tuple[str, str]]) -> str:
    """The text of data/cites.json from pairs of estimator and key."""
    return json.dumps(dict(sorted(cites)), indent=1) + "\n"
