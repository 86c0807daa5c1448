"""How much a live measurement looks at. No torch."""

import difflib
from dataclasses import fields, replace
from typing import Any

from anisoscope.errors import SpecError
from anisoscope.records import DEFAULT_METRICS, Spec

PRESETS: dict[str, dict[str, Any]] = {
    "economy": {
        "metrics": ("leading_variance", "participation_ratio", "loss"),
        "populations": ("all",),
        "tokens": 4096,
        "batch_points": 2048,
    },
    "standard": {"tokens": 16384},
    "gradients": {"metrics": (*DEFAULT_METRICS, "alignment", "pinning"), "tokens": 32768},
    "full": {"metrics": ("anisotropy", "isotropy", "intrinsic_dimension", "contextuality", "final_norm", "loss")},
}
"""What a preset puts in place of the fields that a Spec leaves at their defaults."""


def check_preset(name: str) -> str:
    """The name of a preset; refused where there is none of that name."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise SpecError(f"unknown preset {name!r}: {hint}one of {', '.join(PRESETS)}, or none")
    return name


def fill_in(spec: Spec, preset: str | None) -> Spec:
    """The Spec with a preset's values where it has defaults; None leaves it as it is."""
    if preset is None:
        return spec
    check_preset(preset)
    defaults = {item.name: item.default for item in fields(Spec)}
    left = {name: value for name, value in PRESETS[preset].items() if getattr(spec, name) == defaults[name]}
    return replace(spec, **left)
