"""Which values settings take: tables of rules, checked before anything is loaded. No torch.

Every field of Spec has a rule in `RULES`. Spec checks itself when it is made, whether its values come from Python, from
flags or from a TOML file; `estimate` and functions that take single settings use `check_setting`.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from anisoscope.errors import SpecError

POPULATIONS = ("all", "content", "typical", "types", "matched")
GRADIENTS = ("virtual", "activation", "embedding")
PROXIES = ("pca", "svd", "seminmf", "local_pca")
DTYPES = ("float32", "bfloat16", "float16", "float64")
# Those that metrics/neighbors.py declares.
GRIDE_SCALES = (2, 4, 8, 16, 32, 64)
ENGINES = ("local", "processes", "ray", "slurm")
RANK_RULES = ("variance:SHARE", "participation_ratio", "twonn")
CONTROLS = {
    "type_disjoint": ("tangent_excess", "tangent_energy", "tangent_gain", "normal_ratio"),
    "shuffled_targets": ("tangent_energy",),
    "paper_normals": ("normal_ratio",),
    "shares": ("tangent_anisotropy_share",),
}
"""What gradients can be compared with beside the usual controls, and the metrics that show it."""
MAX_SEED = 2**32 - 1
_SITES = ("embed", "block.0", "block.*", "final_norm", "final_norm.normed", "final_norm.gained")
_SITES += ("embed.weight", "unembed.weight")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The values that a setting takes."""

    wanted: str
    """In words, behind `must be`."""
    accepts: Callable[[Any], bool]
    example: Any = None
    names: tuple[str, ...] = ()
    """The nearest of these is proposed for a misspelt one."""
    several: bool = False
    """Whether the value is a tuple of items that each follow the rule."""
    may_be_empty: bool = False

    def or_none(self) -> "Rule":
        """The same rule for a setting that may be left open."""
        accepts = self.accepts
        return Rule(wanted=self.wanted, accepts=lambda value: value is None or accepts(value), example=self.example)


def whole(low: int, high: int, example: int) -> Rule:
    """Whole numbers; True and False are none."""
    return Rule(
        wanted=f"a whole number between {low} and {high}",
        accepts=lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high,
        example=example,
    )


def number(wanted: str, accepts: Callable[[float], bool], example: float) -> Rule:
    """Finite numbers."""

    def fits(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and math.isfinite(value) and accepts(value)

    return Rule(wanted=f"a number {wanted}", accepts=fits, example=example)


def one_of(names: Iterable[str], example: str) -> Rule:
    """One of several names."""
    known = tuple(names)
    return Rule(wanted=f"one of {', '.join(known)}", accepts=lambda value: value in known, example=example, names=known)


def list_of(item: Rule, *, wanted: str, example: Any, may_be_empty: bool = True) -> Rule:
    """A tuple whose items follow a rule."""
    kept = {"names": item.names, "several": True, "may_be_empty": may_be_empty}
    return Rule(wanted=wanted, accepts=item.accepts, example=example, **kept)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != "" and "\0" not in value and not _SURROGATES.search(value)


def _is_gradient(value: Any) -> bool:
    return isinstance(value, str) and (value in GRADIENTS or re.fullmatch(r"linear:\S.*", value) is not None)


def _is_control(value: Any) -> bool:
    # counterfactuals.py names its variants of the final norm here.
    return value in CONTROLS or (isinstance(value, str) and value.startswith(("norm=", "gain=", "bias=")))


def _is_rank(value: Any) -> bool:
    if not isinstance(value, str):
        return whole(1, _MANY, 16).accepts(value)
    return value in RANK_RULES[1:] or value == "variance" or 0 < _share(value) <= 1


def _share(rule: str) -> float:
    try:
        return float(rule.removeprefix("variance:")) if rule.startswith("variance:") else math.nan
    except ValueError:
        return math.nan


def _is_metric(value: Any) -> bool:
    if isinstance(value, tuple) and len(value) == 2:
        return _is_text(value[0]) and isinstance(value[1], int)
    return _is_text(value)


def _is_site(value: Any) -> bool:
    if not _is_text(value):
        return False
    return value in _SITES or value.startswith(("block.", "final_norm.")) or any(sign in value for sign in "*?[")


# Names of files that are not UTF-8 reach Python with these in them; JSON and keys cannot hold them.
_SURROGATES = re.compile("[\ud800-\udfff]")
_MANY = 2**31 - 1
_TEXT = Rule(wanted="text of at least one character, in UTF-8", accepts=_is_text)
_PATHS = list_of(_TEXT, wanted="paths of modules", example="model.layers")

RULES: Mapping[str, Rule] = {
    "model": Rule(wanted="the name of a model or folder, in UTF-8", accepts=_is_text, example="pocket-decoder"),
    "revision": _TEXT.or_none(),
    "weights": _TEXT.or_none(),
    "run": _TEXT.or_none(),
    "step": whole(0, 10**12, 1000).or_none(),
    "corpus": Rule(wanted="the name of a corpus, file or folder, in UTF-8", accepts=_is_text, example="pydoc"),
    "corpus_hash": _TEXT.or_none(),
    "tokens": whole(1, _MANY, 65536),
    "seq_len": whole(1, 2**24, 512),
    "special_tokens": Rule(wanted="true or false", accepts=lambda value: isinstance(value, bool), example=True),
    "batch_points": whole(2, _MANY, 4096),
    "dtype": one_of(DTYPES, "float32"),
    "seed": whole(0, MAX_SEED, 0),
    "sites": list_of(
        Rule(wanted="", accepts=_is_site, names=_SITES),
        wanted="at least one of embed, block.N, final_norm, embed.weight, unembed.weight, or patterns such as block.*",
        example="embed,block.*,final_norm",
        may_be_empty=False,
    ),
    "populations": list_of(
        one_of(POPULATIONS, "all"), wanted=f"out of {', '.join(POPULATIONS)}", example="all,typical"
    ),
    "typical_k": number("above 0", lambda value: value > 0, 6.0),
    "metrics": list_of(
        Rule(wanted="", accepts=_is_metric),
        wanted="at least one estimator or family (`anisoscope ls metrics`)",
        example="leading_variance,twonn",
        may_be_empty=False,
    ),
    "discard_fraction": number("between 0.0 and 0.99", lambda value: 0 <= value <= 0.99, 0.1),
    "gride_scales": list_of(
        Rule(wanted="", accepts=lambda value: value in GRIDE_SCALES and not isinstance(value, bool)),
        wanted=f"out of {', '.join(map(str, GRIDE_SCALES))}",
        example="2,4,8",
    ),
    "neighbors": whole(2, 1024, 20),
    "isoscore_zeta": number("between 0.0 and 1.0", lambda value: 0 <= value <= 1, 0.25),
    "blocks": _PATHS,
    "final_norm": _PATHS,
    "rank": Rule(
        wanted=f"a whole number of at least 1 or one of {', '.join(RANK_RULES)}, with a SHARE above 0 and at most 1",
        accepts=_is_rank,
        example="variance:0.9",
        names=RANK_RULES[1:],
    ),
    "curvature_rank": whole(1, _MANY, 4),
    "proxy": one_of(PROXIES, "pca"),
    "proxy_from": _TEXT.or_none(),
    "gradients": list_of(
        Rule(wanted="", accepts=_is_gradient, names=GRADIENTS),
        wanted=f"out of {', '.join(GRADIENTS)}, and linear:PATH of a module",
        example="virtual,activation",
    ),
    "controls": list_of(
        Rule(wanted="", accepts=_is_control, names=tuple(CONTROLS)),
        wanted=f"out of {', '.join(CONTROLS)}",
        example="type_disjoint",
    ),
}
RUN_RULES: Mapping[str, Rule] = {
    "engine": one_of(ENGINES, "local"),
    "workers": whole(1, 2**16, 2).or_none(),
    "gpus_per_job": number("of at least 0", lambda value: 0 <= value <= 2**16, 0.5),
    "cpus_per_job": whole(1, 2**16, 1),
    "max_retries": whole(0, 2**16, 2),
    "downloads": whole(1, 2**16, 2),
    "batch_size": whole(1, _MANY, 8).or_none(),
}
"""How measurements are run, which changes no number."""
# Fields that people do not set by a flag of the same name.
_WITHOUT_FLAG = ("model", "weights", "run", "step", "corpus_hash", "proxy_from")


def check_settings(values: Mapping[str, Any]) -> None:
    """Refuse the first setting that is not what its rule wants."""
    for name, value in values.items():
        check_setting(name, value)


def check_setting(name: str, value: Any) -> None:
    """Refuse a value of one setting, with its rule, what came and a value that works."""
    rule = RULES.get(name) or RUN_RULES[name]
    if not rule.several:
        wrong = [] if rule.accepts(value) else [value]
    elif not isinstance(value, tuple):
        wrong = [value]
    else:
        wrong = [item for item in value if not rule.accepts(item)]
        wrong = wrong or ([] if value or rule.may_be_empty else [value])
    if not wrong:
        return
    flag = f"--{name.replace('_', '-')}"
    title = name if name in _WITHOUT_FLAG else f"{name} ({flag})"
    near = difflib.get_close_matches(wrong[0], rule.names, n=1, cutoff=0.5) if isinstance(wrong[0], str) else []
    hint = f"; did you mean {near[0]}?" if near else ""
    if rule.example is not None:
        given = str(rule.example).lower() if isinstance(rule.example, bool) else rule.example
        hint += f"; example: {given}" if name in _WITHOUT_FLAG else f"; example: {flag} {given}"
    if name == "special_tokens":
        hint = "; example: --no-special-tokens"
    raise SpecError(f"{title} must be {rule.wanted}; got {', '.join(map(_show, wrong))}{hint}")


def _show(value: Any) -> str:
    text = repr(value).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 100 else f"{text[:100]}... ({len(text)} characters)"
