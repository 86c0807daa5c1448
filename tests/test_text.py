"""Corpora, windows and token frequencies, on text and tokenizers made here; nothing is downloaded."""

import gzip
import hashlib
import io
import itertools
import json
import logging
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shell import APART
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

import anisoscope as an
from anisoscope import corpora, large_files
from anisoscope.corpora import CORPORA, Corpus, load_corpus
from anisoscope.errors import CorpusError, MissingPackageError, SpecError
from anisoscope.large_files import LargeLines, LargeText
from anisoscope.models import load_model
from anisoscope.probes import draw_probe
from anisoscope.text import Windows, draw_windows, token_frequencies


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("ANISOSCOPE_DATA", raising=False)


def make_corpus(documents: list[str], folder: Path) -> Corpus:
    path = folder / "made.jsonl"
    path.write_text("\n".join(json.dumps({"text": document}) for document in documents), encoding="utf-8")
    return load_corpus(str(path))


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """200 documents of 20 to 219 words, each word carrying its document's and its own number: no two are equal."""
    documents = [" ".join(f"é{number}x{word}" for word in range(20 + number)) for number in range(200)]
    return make_corpus(documents, tmp_path_factory.mktemp("numbered"))


def train_bpe(*, special_tokens: bool, limit: int = 10**9) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["[CLS]", "[SEP]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the cat sat on the mat", "é1x1 é2x2 é10x10", "one\n\ntwo"], trainer)
    if special_tokens:
        pieces = [("[CLS]", inner.token_to_id("[CLS]")), ("[SEP]", inner.token_to_id("[SEP]"))]
        inner.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=pieces)
    return PreTrainedTokenizerFast(tokenizer_object=inner, cls_token="[CLS]", sep_token="[SEP]", model_max_length=limit)


PLAIN = train_bpe(special_tokens=False)
FRAMED = train_bpe(special_tokens=True)


@pytest.mark.parametrize("count", [20, 10**6], ids=["few", "all"])
@pytest.mark.parametrize("tokenizer", [PLAIN, FRAMED, ByT5Tokenizer()], ids=["plain", "framed", "slow"])
def test_windows_are_stretches_of_the_corpus_that_never_overlap(numbered, tokenizer, count):
    windows = draw_windows(numbered, tokenizer, seq_len=64, count=count, seed=0)
    assert windows.token_ids.shape[1] == 64
    assert windows.documents.shape == windows.special.shape == windows.token_ids.shape
    whole = "\n\n".join(numbered.documents)
    ends = []
    for ids, special in zip(windows.token_ids, windows.special, strict=True):
        shown = tokenizer.decode(ids[~special], clean_up_tokenization_spaces=False)
        shown = shown.strip("\ufffd")  # A window may end inside a character.
        assert whole.count(shown) == 1
        ends.append((whole.index(shown), whole.index(shown) + len(shown)))
    ends.sort()
    assert all(previous[1] <= following[0] for previous, following in itertools.pairwise(ends))
    if count == 10**6:
        assert sum(end - begin for begin, end in ends) > 0.95 * len(whole)


def test_windows_come_from_the_whole_corpus_in_random_order(numbered):
    windows = draw_windows(numbered, PLAIN, seq_len=32, count=200, seed=0)
    assert windows.token_ids.shape == (200, 32)
    first = windows.documents[:, 0]
    length = np.cumsum([len(document) for document in numbered.documents])
    place = length[first] / length[-1]
    assert np.histogram(place, bins=5, range=(0, 1))[0].min() > 20
    assert abs(np.corrcoef(place, np.arange(200))[0, 1]) < 0.25


def test_windows_come_from_documents_apart_where_there_are_enough(tmp_path):
    words = " ".join(f"w{number % 97}" for number in range(400))
    corpus = make_corpus([f"{number} {words}" for number in range(60)], tmp_path)
    settings = {"seq_len": 32, "seed": 0, "documents_apart": True}
    windows = draw_windows(corpus, PLAIN, count=40, **settings)
    held = [set(row.tolist()) for row in windows.documents]
    assert len(held) == 40
    assert sum(map(len, held)) == len(set().union(*held))
    assert not windows.notes
    # By chance alone some share one.
    plain = draw_windows(corpus, PLAIN, count=40, seq_len=32, seed=0)
    held = [set(row.tolist()) for row in plain.documents]
    assert sum(map(len, held)) > len(set().union(*held))
    # Where there are too few documents the others come after those apart, and it is said.
    few = draw_windows(make_corpus([f"{number} {words}" for number in range(8)], tmp_path), PLAIN, count=30, **settings)
    assert len(few.token_ids) == 30
    (note,) = few.notes
    apart = int(note.split()[0])
    assert note == f"{apart} of 30 windows share no document with another"
    held = [set(row.tolist()) for row in few.documents[:apart]]
    assert 5 <= apart <= 8
    assert sum(map(len, held)) == len(set().union(*held))


@pytest.mark.parametrize("tokenizer", [PLAIN, FRAMED, ByT5Tokenizer()], ids=["plain", "framed", "slow"])
def test_each_token_knows_its_document_across_a_border(numbered, tokenizer):
    windows = draw_windows(numbered, tokenizer, seq_len=128, count=10**6, seed=1)
    crossing = 0
    for ids, owners, special in zip(windows.token_ids, windows.documents, windows.special, strict=True):
        assert (np.diff(owners) >= 0).all()
        crossing += owners[0] != owners[-1]
        for owner in np.unique(owners):
            shown = tokenizer.decode(ids[(owners == owner) & ~special], clean_up_tokenization_spaces=False)
            assert shown.strip("\ufffd\n") in numbered.documents[owner]
    assert crossing > 10


def test_each_token_knows_its_sentence(tmp_path):
    text = 'It is 3.5 here. "Is it?" he said!  Yes\nno. ' * 40
    corpus = make_corpus([text, "Another document without an end"], tmp_path)
    tokenizer = train_bpe(special_tokens=False)
    windows = draw_windows(corpus, tokenizer, seq_len=64, count=10**6, seed=0)
    tape = text + corpora.SEPARATOR + corpus.documents[1]
    found = Counter()
    for ids, sentences in zip(windows.token_ids, windows.sentences, strict=True):
        for start in np.unique(sentences):
            piece = tokenizer.decode(ids[sentences == start]).strip()
            # What a window holds of the sentence that begins there: all of it, or a part at the window's edge.
            assert piece in tape[start : start + 40]
            found[piece] += 1
    assert {"It is 3.5 here.", '"Is it?"', "he said!", "Yes", "no."} <= set(found)
    taken = windows.take(slice(1, 3))
    assert taken.sentences.shape == taken.token_ids.shape == (2, 64)


def test_special_tokens_are_inside_the_length_and_marked(numbered):
    windows = draw_windows(numbered, FRAMED, seq_len=16, count=30, seed=0)
    assert (windows.token_ids[:, 0] == FRAMED.cls_token_id).all()
    assert (windows.token_ids[:, -1] == FRAMED.sep_token_id).all()
    assert windows.special[:, [0, -1]].all()
    assert not windows.special[:, 1:-1].any()
    bare = draw_windows(numbered, FRAMED, seq_len=16, count=30, seed=0, special_tokens=False)
    assert bare.token_ids.shape == (30, 16)
    assert not bare.special.any()


def test_slow_tokenizers_keep_their_special_tokens_inside_the_length(numbered):
    tokenizer = ByT5Tokenizer()
    windows = draw_windows(numbered, tokenizer, seq_len=50, count=10, seed=0)
    assert (windows.token_ids[:, -1] == tokenizer.eos_token_id).all()
    assert (windows.special == (np.arange(50) == 49)).all()


def test_an_unknown_word_is_content_and_not_special(tmp_path):
    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "known": 1}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    corpus = make_corpus(["known strange " * 40], tmp_path)
    for tokenizer, marked in (
        (PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]"), False),
        (PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", eos_token="[UNK]"), True),
    ):
        windows = draw_windows(corpus, tokenizer, seq_len=16, count=2, seed=0)
        assert set(windows.token_ids.flatten()) == {0, 1}
        assert windows.special[windows.token_ids == 0].all() == marked
        assert windows.special.any() == marked


def test_special_tokens_written_in_the_text_are_marked(tmp_path):
    corpus = make_corpus(["the cat [SEP] sat on the mat"], tmp_path)
    windows = draw_windows(corpus, PLAIN, seq_len=8, count=1, seed=0)
    assert (windows.special == (windows.token_ids == PLAIN.sep_token_id)).all()
    assert windows.special.sum() == 1


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(numbered):
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    first, again, other = (draw_windows(numbered, PLAIN, seq_len=32, count=50, seed=seed) for seed in (3, 3, 4))
    assert first.token_ids.tobytes() == again.token_ids.tobytes()
    assert first.documents.tobytes() == again.documents.tobytes()
    assert first.token_ids.tobytes() != other.token_ids.tobytes()
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002


def test_few_windows_do_not_tokenise_the_whole_corpus(tmp_path):
    corpus = make_corpus(["the cat sat on the mat " * 50_000], tmp_path)
    read = 0

    class Counting(PreTrainedTokenizerFast):
        def __call__(self, text, **options):  # pyright: ignore[reportIncompatibleMethodOverride]
            nonlocal read
            read += len(text)
            return super().__call__(text, **options)

    tokenizer = Counting(tokenizer_object=PLAIN.backend_tokenizer)
    assert draw_windows(corpus, tokenizer, seq_len=64, count=10, seed=0).token_ids.shape == (10, 64)
    assert read < 0.1 * len(corpus.documents[0])


def test_spans_too_dense_for_a_window_are_passed_over_with_a_note(tmp_path):
    # Half of the corpus needs one token for 22 characters, the other half one for each byte.
    tokenizer = train_bpe(special_tokens=False)
    tokenizer.add_tokens(["supercalifragilistical"])
    corpus = make_corpus(["supercalifragilistical " * 500, "0123456789 " * 5000], tmp_path)
    windows = draw_windows(corpus, tokenizer, seq_len=64, count=40, seed=0)
    assert windows.token_ids.shape == (40, 64)
    assert any("passed over" in note for note in windows.notes)


def test_a_small_corpus_gives_what_it_has_and_says_so(tmp_path):
    corpus = make_corpus(["the cat sat on the mat. " * 20], tmp_path)
    windows = draw_windows(corpus, PLAIN, seq_len=50, count=100, seed=0)
    total = len(PLAIN(corpus.documents[0])["input_ids"])
    assert len(windows.token_ids) == total // 50
    assert f"gives {total // 50} windows" in windows.notes[0]


def test_a_corpus_too_small_for_one_window_says_how_many_tokens_it_has(tmp_path):
    corpus = make_corpus(["the cat sat on the mat"], tmp_path)
    tokens = len(PLAIN(corpus.documents[0])["input_ids"])
    with pytest.raises(CorpusError, match=rf"has {tokens} tokens: too few for one window of 512"):
        draw_windows(corpus, FRAMED, seq_len=512, count=1, seed=0)


def test_windows_longer_than_the_models_limit_are_noted_without_noise(numbered, caplog, capfd, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = train_bpe(special_tokens=True, limit=8)
    windows = draw_windows(numbered, tokenizer, seq_len=64, count=5, seed=0)
    token_frequencies(numbered, tokenizer)
    assert windows.token_ids.shape == (5, 64)
    assert "limit of 8" in windows.notes[0]
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("seq_len", "count"), [(0, 1), (8, 0), (2, 1)])
def test_windows_that_cannot_be_are_refused(numbered, seq_len, count):
    with pytest.raises(SpecError, match="seq_len"):
        draw_windows(numbered, FRAMED, seq_len=seq_len, count=count, seed=0)


def test_token_frequencies_equal_counting_by_hand(numbered):
    for tokenizer in (FRAMED, ByT5Tokenizer()):
        counts = token_frequencies(numbered, tokenizer)
        counted: Counter[int] = Counter()
        for document in numbered.documents:
            counted.update(tokenizer(document, add_special_tokens=False)["input_ids"])
        assert counts.dtype == np.int64
        assert counts.shape == (len(tokenizer),)
        assert {index: count for index, count in enumerate(counts.tolist()) if count} == counted
    assert (token_frequencies(numbered, FRAMED, at_most=10_000_000) == token_frequencies(numbered, FRAMED)).all()


def test_token_frequencies_of_a_long_document_lose_nothing_at_its_cuts(tmp_path):
    words = [f"word{number % 977}" for number in range(40_000)]
    corpus = make_corpus([" ".join(words)], tmp_path)
    assert len(corpus.documents[0]) > 250_000
    assert token_frequencies(corpus, ByT5Tokenizer()).sum() == len(corpus.documents[0])


def test_token_frequencies_from_too_few_tokens_are_refused(numbered):
    with pytest.raises(SpecError, match="10,000,000 or more"):
        token_frequencies(numbered, PLAIN, at_most=9_999_999)


def test_token_frequencies_stop_at_the_limit(tmp_path):
    class OneToken:
        """Every character is token 0: ten million of them cost nothing."""

        def __call__(self, texts, **_):
            return {"input_ids": [[0] * len(text) for text in texts]}

        def __len__(self):
            return 1

        def get_vocab(self):
            return {"x": 0}

    (tmp_path / "a.txt").write_text("x" * 10_000_100)
    assert token_frequencies(load_corpus(str(tmp_path / "a.txt")), OneToken(), at_most=10_000_000).tolist() == [10**7]


def test_files_folders_and_lines_become_documents(tmp_path):
    (tmp_path / "b.txt").write_bytes("\ufeffzweites Stück".encode())
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt.gz").write_bytes(gzip.compress(b"first", mtime=0))
    (tmp_path / "sub" / "c.jsonl").write_text(
        '{"text": "one\u2028line"}\n\n{"text": "two", "id": 7}\n', encoding="utf-8"
    )
    (tmp_path / ".hidden").write_text("never")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("never")
    corpus = load_corpus(str(tmp_path))
    assert corpus.name == str(tmp_path)
    assert corpus.titles == ("b.txt", "sub/a.txt.gz", "sub/c.jsonl:1", "sub/c.jsonl:3")
    assert corpus.documents == ("zweites Stück", "first", "one\u2028line", "two")
    assert load_corpus(str(tmp_path / "sub" / "a.txt.gz")).documents == ("first",)
    assert load_corpus(str(tmp_path / "sub" / "c.jsonl")).titles == ("c.jsonl:1", "c.jsonl:3")


def test_the_hash_tells_where_documents_end(tmp_path):
    joined, split, same = (make_corpus(texts, tmp_path).hash for texts in (["ab", "c"], ["a", "bc"], ["ab", "c"]))
    assert joined == same == hashlib.sha256(b"2:ab1:c").hexdigest()
    assert joined != split


def test_standard_input_is_one_document(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("grün\n".encode())))
    corpus = load_corpus("-")
    assert (corpus.name, corpus.documents, corpus.titles) == ("stdin", ("grün\n",), ("stdin",))


def test_undecodable_bytes_are_named_with_file_and_offset(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(CorpusError, match=r"latin\.txt is not UTF-8 at byte 3"):
        load_corpus(str(tmp_path))


@pytest.mark.parametrize("line", ["{", "[1]", '{"body": "x"}', '{"text": null}', '"text"'])
def test_a_line_without_text_is_named(tmp_path, line):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(CorpusError, match=r"bad\.jsonl line 2 is not a JSON object"):
        load_corpus(str(tmp_path / "bad.jsonl"))


def test_half_a_surrogate_pair_is_not_text(tmp_path):
    (tmp_path / "half.jsonl").write_text('{"text": "ab\\ud800"}')
    with pytest.raises(CorpusError, match=r"half\.jsonl:1 .* at character 2"):
        load_corpus(str(tmp_path / "half.jsonl"))


@pytest.mark.parametrize(
    ("name", "data"), [("cut.gz", gzip.compress(b"words " * 99, mtime=0)[:-9]), ("enwik8.zip", b"no zip")]
)
def test_broken_archives_are_named(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorpusError, match=f"{name} cannot be read"):
        load_corpus(str(tmp_path / name))


def test_an_empty_corpus_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="is empty"):
        load_corpus(str(tmp_path))


def test_an_unknown_name_lists_the_known_ones_and_guesses():
    with pytest.raises(CorpusError, match=r"Did you mean enwik8\? Known: pydoc, enwik8"):
        load_corpus("enwiki8")
    with pytest.raises(CorpusError) as caught:
        load_corpus("no/such/file.txt")
    assert "Did you mean" not in str(caught.value)


def test_every_named_corpus_is_described_in_one_line():
    assert set(CORPORA) == {"pydoc", "enwik8"}
    assert all(0 < len(line) <= 120 and "\n" not in line for line in CORPORA.values())


@pytest.fixture
def _own_dataset_cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


@pytest.mark.usefixtures("_own_dataset_cache")
def test_a_local_dataset_is_read_by_split_and_column(tmp_path):
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "data"
    folder.mkdir()
    for split, number in (("train", 5), ("test", 2)):
        rows = {"n": list(range(number)), "text": [f"{split} {row}" for row in range(number)], "body": ["b"] * number}
        pyarrow.parquet.write_table(pyarrow.table(rows), folder / f"{split}-00000.parquet")
    corpus = load_corpus(f"hf:{folder}")
    assert corpus.name == f"hf:{folder}"
    assert corpus.documents == tuple(f"train {row}" for row in range(5))
    assert corpus.titles == tuple(f"row {row}" for row in range(5))
    assert "5 of 5 rows" in corpus.notes[0]
    assert load_corpus(f"hf:{folder}:test").documents == ("test 0", "test 1")
    assert load_corpus(f"hf:{folder}:test:body").documents == ("b", "b")
    with pytest.raises(CorpusError, match=r"no split 'dev'; it has train, test|no split 'dev'; it has test, train"):
        load_corpus(f"hf:{folder}:dev")
    with pytest.raises(CorpusError, match="no text column 'n'; it has text, body"):
        load_corpus(f"hf:{folder}:test:n")


@pytest.mark.usefixtures("_own_dataset_cache")
def test_a_large_dataset_is_sampled_from_all_its_rows_up_to_the_cap(tmp_path, monkeypatch):
    import datasets

    rows = datasets.Dataset.from_dict({"words": [f"{row:05d} " * 2 for row in range(4000)]})
    rows.save_to_disk(tmp_path / "saved")
    monkeypatch.setattr(corpora, "HUB_CHARACTERS", 4000)
    corpus = load_corpus(f"hf:{tmp_path / 'saved'}")
    numbers = [int(document[:5]) for document in corpus.documents]
    assert numbers == sorted(numbers)
    assert max(numbers) > 3500
    assert len(numbers) < 1000
    assert "until 4,000 characters were reached" in corpus.notes[0]
    assert corpus.hash == load_corpus(f"hf:{tmp_path / 'saved'}").hash


@pytest.mark.usefixtures("_own_dataset_cache")
def test_a_dataset_that_is_nowhere_is_a_corpus_error(tmp_path):
    with pytest.raises(CorpusError, match="cannot be loaded"):
        load_corpus(f"hf:{tmp_path / 'nowhere'}")


def test_datasets_missing_is_told_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match=r"anisoscope\[data\]"):
        load_corpus("hf:some/thing")


def test_pydoc_reads_the_standard_library_without_importing_it():
    code = (
        "import sys; from anisoscope.corpora import load_corpus; corpus = load_corpus('pydoc');"
        "assert not {'antigravity', 'this', 'turtle', 'datasets', 'torch', 'transformers'} & set(sys.modules);"
        "print(corpus.hash)"
    )
    source = str(Path(corpora.__file__).parents[1])
    command = [sys.executable, "-W", "error", "-c", f"import sys; sys.path.insert(0, {source!r}); {code}"]
    other = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    corpus = load_corpus("pydoc")
    assert corpus.hash == other
    assert {"turtle", "json", "json.decoder", "os"} <= set(corpus.titles)
    assert not any(title.split(".")[0] in ("test", "site-packages", "pip", "numpy") for title in corpus.titles)
    assert sys.version.split()[0] in corpus.notes[0]
    decoder = corpus.documents[corpus.titles.index("json.decoder")]
    inside = ["Implementation of JSONDecoder", "Subclass of ValueError", "Simple JSON", "Return the Python"]
    places = [decoder.index(words) for words in inside]
    assert places == sorted(places)


PAGES = """<mediawiki><siteinfo><sitename>Wikipedia</sitename></siteinfo>
<page><title>Old name</title><text xml:space="preserve">#redirect [[New name]]</text></page>
<page><title>Wikipedia:Rules</title><text xml:space="preserve">House rules.</text></page>
<page><title>Empty</title><text xml:space="preserve" /></page>
<page><title>Salt &amp; Pepper</title><text xml:space="preserve">{BODY}</text></page>
<page><title>Last</title><text xml:space="preserve">Whole line about [[tea]].
A line that breaks o"""


def read_article(body: str, folder: Path) -> str:
    escaped = body.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    (folder / "enwik8").write_text(PAGES.replace("{BODY}", escaped), encoding="utf-8")
    corpus = load_corpus(str(folder / "enwik8"))
    assert corpus.titles == ("Salt & Pepper", "Last")
    assert corpus.documents[1] == "Whole line about tea."
    return corpus.documents[0]


@pytest.mark.parametrize(
    ("wikitext", "shown"),
    [
        ("'''Salt''' is ''white'', '''''very'''''.", "Salt is white, very."),
        (
            "Case KEPT; punctuation, too! Ünïcödé &alpha;&#946;&mdash;&nbsp;x",
            "Case KEPT; punctuation, too! Ünïcödé αβ— x",
        ),
        ("A&lt;b&gt; is shown", "A<b> is shown"),
        (
            "See [[tea]], [[Tea (drink)|a drink]], [[cup]]s and [[:Category:Tea]].",
            "See tea, a drink, cups and Category:Tea.",
        ),
        ("A[[Image:a.jpg|thumb|An [[apple|Apple]] [1] and [http://x.org y]]] B [[File:b.ogg]]C", "A B C"),
        ("End.\n[[Category:Tea|T]]\n[[de:Tee]]\n[[zh-min-nan:Te]]\n[[simple:Tea]]", "End."),
        ("A [http://x.org/a?b=c the site], [http://y.org] and [mailto:a@b.c [[mail]] me].", "A the site, and mail me."),
        ("A<ref>note</ref> b<ref name=\"n\">more\nlines</ref> c<ref name='n' />.", "A b c."),
        ("A <math>x < \\frac{1}{2}</math>B <code>if x:</code>C", "A B C"),
        ("A\n<pre>\nraw [[text]]\n</pre>\nB\n<gallery>\nImage:a.jpg|A\n</gallery>\nC", "A\n\nB\n\nC"),
        ("A <!-- hidden\n[[link]] -->B <!-- never closed", "A B"),
        ("{{Infobox|a={{b|c={{d}}}}|e=f}}Text {{cn}}here ({{IPA|x}}).", "Text here ."),
        ("A\n{| class=x\n|-\n| cell {{t|}} || b\n:{| inner\n| in\n|}\n| out\n|}\nB", "A\n\nB"),
        ("A\n{| never closed\n| cell\n|-\n| other", "A"),
        (
            'A<br>B<br />C <font color="red">D</font> H<sub>2</sub>O 10<sup>6</sup> 1<sup>st</sup>',
            "A\nB\nC D H2O 10^6 1st",
        ),
        ("== One ==\nText\n===Two===\nE = mc", "One\nText\nTwo\nE = mc"),
        ("* a\n** b\n# c\n: d\n;e\n----\nf", "a\nb\nc\nd\ne\n\nf"),
        ("A\n int main() { return 0; }\nB\n\n\n\n\nC  D \nE", "A\n\nB\n\nC D\nE"),
        ("__NOTOC__Open {{never and [[never", "Open never and never"),
        ("A<table border=1><tr><td>cell</td></tr></table>B", "AB"),
    ],
)
def test_markup_is_removed_and_prose_is_kept(tmp_path, wikitext, shown):
    assert read_article(wikitext, tmp_path) == shown


def test_enwik8_is_found_by_path_folder_and_cache_and_counts_its_bytes(tmp_path, monkeypatch):
    plain = read_article("Zürich has a lake.", tmp_path)
    raw = (tmp_path / "enwik8").read_bytes()
    data = tmp_path / "data"
    data.mkdir()
    (data / "enwik8.gz").write_bytes(gzip.compress(raw, mtime=0))
    (tmp_path / "other.bin").write_bytes(raw)
    by_path = load_corpus(f"enwik8:{tmp_path / 'other.bin'}")
    monkeypatch.setenv("ANISOSCOPE_DATA", str(data))
    by_folder = load_corpus("enwik8")
    assert by_path == by_folder
    assert by_folder.name == "enwik8"
    assert by_folder.documents[0] == plain
    cleaned = set("".join(by_folder.documents).encode())
    assert f"{len(set(raw))} distinct bytes in the raw file, {len(cleaned)} after cleaning" in by_folder.notes[0]
    assert f"not the published file but another one of {len(raw)} bytes" in by_folder.notes[0].replace(",", "")


def test_cleaned_enwik8_is_kept_and_a_broken_or_forbidden_cache_does_no_harm(tmp_path, monkeypatch):
    first = read_article("A [[lake]].", tmp_path)
    (kept,) = corpora._cache_folder().glob("enwik8-*.json")
    kept.write_text(json.dumps([["From", "the cache"]]))
    assert load_corpus(str(tmp_path / "enwik8")).documents == ("the cache",)
    kept.write_text("[[")
    assert load_corpus(str(tmp_path / "enwik8")).documents[0] == first
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load_corpus(str(tmp_path / "enwik8")).documents[0] == first


def test_enwik8_without_file_and_network_says_where_to_put_it(monkeypatch):
    def refuse(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(CorpusError, match=r"no network.*ANISOSCOPE_DATA.*enwik8:PATH"):
        load_corpus("enwik8")


def test_enwik8_is_downloaded_once_and_checked(tmp_path, monkeypatch):
    read_article("A lake.", tmp_path)
    raw = (tmp_path / "enwik8").read_bytes()
    packed, asked = io.BytesIO(), []
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("enwik8", raw)

    def serve(url, timeout):
        asked.append(url)
        return io.BytesIO(packed.getvalue())

    monkeypatch.setattr(urllib.request, "urlopen", serve)
    with pytest.raises(CorpusError, match="not enwik8"):
        load_corpus("enwik8")
    monkeypatch.setattr(corpora, "ENWIK8_SHA256", hashlib.sha256(raw).hexdigest())
    assert load_corpus("enwik8") == load_corpus("enwik8")
    assert asked == [corpora.ENWIK8_URL] * 2
    assert sorted(path.name.split("-")[0] for path in corpora._cache_folder().iterdir()) == ["enwik8", "enwik8.zip"]


# Files that stay on disk.

PIECES = (
    *("a few words. ", "übermäßig große Wörter; ", "漢字かな交じり文。\n", "\U0001d54f and \u2028 more!\n\n"),
    "x" * 90,
)


def texts(count: int) -> list[str]:
    chooser = np.random.default_rng(0)
    return ["".join(PIECES[k] for k in chooser.integers(len(PIECES), size=400)) for _ in range(count)]


def write_large(folder: Path, kind: str) -> Path:
    path = folder / f"large.{kind}"
    if kind == "txt":
        path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(texts(30)).encode())
        return path
    lines = [json.dumps({"text": text}, ensure_ascii=bool(place % 2)) for place, text in enumerate(texts(40))]
    lines[3:3] = ["", json.dumps({"text": " \n"}), "  "]
    path.write_bytes("\r\n".join(lines).encode())
    return path


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_file_that_stays_on_disk_gives_the_same_text_and_numbers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_models: dict[str, Path]
) -> None:
    path = write_large(tmp_path, kind)
    tokenizer = load_model(str(saved_models["decoder"]), device="cpu").tokenizer
    whole = load_corpus(str(path))
    monkeypatch.setattr(corpora, "LARGE_FILE", 0)
    monkeypatch.setattr(large_files, "_BLOCK", 1000)
    monkeypatch.chdir(tmp_path)
    left = replace(load_corpus(path.name), name=whole.name)
    monkeypatch.chdir("/")
    assert isinstance(whole.documents, tuple)
    assert isinstance(left.documents[0], LargeText) == (kind == "txt")
    assert isinstance(left.documents, LargeLines) == (kind == "jsonl")
    assert left.hash == whole.hash
    assert list(left.titles) == list(whole.titles)
    assert [str(text) for text in left.documents] == list(whole.documents)
    spec = an.Spec(model="tiny", tokens=2048, seq_len=32, seed=3)
    for one, other in zip(
        (draw_windows(whole, tokenizer, seq_len=32, count=40, seed=1), *halves(draw_probe(spec, tokenizer, whole))),
        (draw_windows(left, tokenizer, seq_len=32, count=40, seed=1), *halves(draw_probe(spec, tokenizer, left))),
        strict=True,
    ):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.documents, other.documents)
        assert np.array_equal(one.sentences, other.sentences)
    assert np.array_equal(token_frequencies(whole, tokenizer), token_frequencies(left, tokenizer))
    frequencies = [draw_probe(spec, tokenizer, corpus).log_frequency for corpus in (whole, left)]
    assert np.array_equal(*frequencies)


def halves(probe: Any) -> tuple[Windows, Windows, Windows]:
    return probe.fit, probe.test, probe.windows


def test_faults_of_a_file_that_stays_on_disk_are_those_of_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = {
        "bad.txt": "ü".encode() * 900 + b"\xff more",
        "blank.txt": b" \n" * 2000,
        "blank.jsonl": b'{"text": " "}\n',
    }
    faults |= {"bad.jsonl": b'{"text": "a"}\n{"text": 5}\n', "half.jsonl": b'{"text": "\\ud800"}\n'}
    said: dict[str, list[str]] = {name: [] for name in faults}
    for limit in (1 << 25, 0):
        monkeypatch.setattr(corpora, "LARGE_FILE", limit)
        monkeypatch.setattr(large_files, "_BLOCK", 1000)
        for name, data in faults.items():
            (tmp_path / name).write_bytes(data)
            with pytest.raises(CorpusError) as caught:
                load_corpus(str(tmp_path / name))
            said[name].append(str(caught.value))
    for name, (one, other) in said.items():
        assert one == other, name


def test_a_file_that_changes_while_it_is_measured_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "LARGE_FILE", 0)
    path = write_large(tmp_path, "txt")
    document = load_corpus(str(path)).documents[0]
    path.write_text("something else")
    with pytest.raises(CorpusError, match=r"large.txt changed while it was measured"):
        document[0:10]


LARGE = """
import resource, sys
from anisoscope.corpora import load_corpus
from anisoscope.models import load_model
from anisoscope.probes import draw_probe
from anisoscope.records import Spec
from anisoscope.text import draw_windows
tokenizer = load_model("pocket-decoder").tokenizer
corpus = load_corpus(sys.argv[1])
assert draw_windows(corpus, tokenizer, seq_len=128, count=64, seed=0).token_ids.shape == (64, 128)
assert len(draw_probe(Spec(model="m", tokens=8192, seq_len=128), tokenizer, corpus).windows.token_ids) == 64
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_memory_does_not_grow_with_the_size_of_a_text_file(kind: str, tmp_path: Path) -> None:
    peaks = []
    paragraph = "".join(texts(1))
    block = json.dumps({"text": paragraph}) + "\n" if kind == "jsonl" else paragraph + "\n"
    path = tmp_path / f"text.{kind}"
    for size in (40_000_000, 200_000_000):
        with path.open("w", encoding="utf-8") as file:
            for _ in range(size // len(block.encode())):
                file.write(block)
        command = [*APART, sys.executable, "-c", LARGE, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    path.unlink()
    assert peaks[1] < 1.2 * peaks[0]


@pytest.mark.parametrize("name", ["", "heldout:", "heldout: "])
def test_an_empty_name_is_not_the_current_folder(name: str) -> None:
    with pytest.raises(CorpusError, match="the name of the corpus is empty"):
        load_corpus(name)
