"""Papers as Specs: one TOML file each, with the paper's models and what its text and its code do differently."""

import difflib
import importlib.resources
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anisoscope.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What a paper measured, and how."""

    name: str
    title: str
    cite: str
    spec: Mapping[str, Any]
    """Fields of Spec that differ from its defaults."""
    models: tuple[str, ...]
    dynamics: tuple[str, ...]
    """Models the paper follows over training."""
    revisions: tuple[str, ...]
    """At these checkpoints, where it names them."""
    notes: tuple[str, ...]


def protocol_names() -> list[str]:
    """The shipped protocols."""
    files = importlib.resources.files("anisoscope.protocols").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_protocol(name: str) -> Protocol:
    """A shipped protocol by name."""
    if name not in protocol_names():
        close = difflib.get_close_matches(name, protocol_names(), n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(protocol_names())}"
        raise SpecError(f"unknown protocol {name!r}; {hint}")
    text = importlib.resources.files("anisoscope.protocols").joinpath(f"{name}.toml").read_text("utf-8")
    data = tomllib.loads(text)
    return Protocol(
        name=name,
        title=data["title"],
        cite=data["cite"],
        spec={name: tuple(value) if isinstance(value, list) else value for name, value in data["spec"].items()},
        models=tuple(data["models"]["encoders"] + data["models"]["decoders"]),
        dynamics=tuple(data["models"]["dynamics"]),
        revisions=tuple(data["models"].get("revisions", ())),
        notes=tuple(data["notes"]),
    )
