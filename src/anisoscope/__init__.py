"""The shape of transformer representations, and how training made it so.

The public names are resolved on first use: importing anisoscope loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anisoscope import figures as figures
    from anisoscope.claims import Verdict as Verdict
    from anisoscope.claims import judge as judge
    from anisoscope.errors import AnisoscopeError as AnisoscopeError
    from anisoscope.estimates import estimate as estimate
    from anisoscope.live import Scope as Scope
    from anisoscope.records import Estimate as Estimate
    from anisoscope.records import Record as Record
    from anisoscope.records import Spec as Spec
    from anisoscope.records import Unit as Unit
    from anisoscope.schedules import every as every
    from anisoscope.schedules import log_spaced as log_spaced
    from anisoscope.shells import LightningCallback as LightningCallback  # pyright: ignore[reportAttributeAccessIssue]
    from anisoscope.shells import TrainerCallback as TrainerCallback
    from anisoscope.store import Store as Store
    from anisoscope.sweep import run_sweep as run_sweep
    from anisoscope.walk import measure as measure

__version__ = "0.1.0"

_ROOM_OF = {
    "AnisoscopeError": "errors",
    "Estimate": "records",
    "LightningCallback": "shells",
    "Record": "records",
    "Scope": "live",
    "Spec": "records",
    "Store": "store",
    "TrainerCallback": "shells",
    "Unit": "records",
    "Verdict": "claims",
    "estimate": "estimates",
    "every": "schedules",
    "judge": "claims",
    "log_spaced": "schedules",
    "measure": "walk",
    "run_sweep": "sweep",
}

__all__ = [
    "AnisoscopeError",
    "Estimate",
    "LightningCallback",
    "Record",
    "Scope",
    "Spec",
    "Store",
    "TrainerCallback",
    "Unit",
    "Verdict",
    "__version__",
    "estimate",
    "every",
    "figures",
    "judge",
    "log_spaced",
    "measure",
    "run_sweep",
]


def __getattr__(name: str) -> Any:
    if name == "figures":
        return import_module("anisoscope.figures")
    if name in _ROOM_OF:
        return getattr(import_module(f"anisoscope.{_ROOM_OF[name]}"), name)
    raise AttributeError(f"module 'anisoscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
