"""What can go wrong, as a tree.

    AnisoscopeError          everything anisoscope raises on purpose; the command line prints it without a traceback
    ├── SpecError            a request that cannot be honoured: unknown metric, site or population, impossible number
    ├── CorpusError          text that is missing, empty or cannot be decoded
    ├── ModelError           a model or tokenizer that cannot be loaded
    │   ├── LayoutError      its blocks and final norm were not found, or failed the check at load
    │   └── CheckpointError  checkpoints that were not found, or are not what their names say
    ├── StatesError          states or points that are not finite
    ├── StoreError           a run folder that cannot be read or written
    └── MissingPackageError  an optional package, with the command that installs it

A message says what was wanted, what came, and what to do. Data that forbid a number (all points equal, too few points)
are no errors: they give NaN with a note.
"""


class AnisoscopeError(Exception):
    """Root of every error raised on purpose."""


class SpecError(AnisoscopeError, ValueError):
    """A request that cannot be honoured."""


class CorpusError(AnisoscopeError):
    """Text that is missing, empty or cannot be decoded."""


class ModelError(AnisoscopeError):
    """A model or tokenizer that cannot be loaded."""


class LayoutError(ModelError):
    """Blocks or final norm not found, or a check at load that failed."""


class CheckpointError(ModelError):
    """Checkpoints that were not found, or are not what their names say."""


class StatesError(AnisoscopeError, ValueError):
    """States or points that are not finite."""


class StoreError(AnisoscopeError, OSError):
    """A run folder that cannot be read or written."""


class MissingPackageError(AnisoscopeError, ImportError):
    """An optional package is not installed."""

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}: pip install 'anisoscope[{extra}]'")
