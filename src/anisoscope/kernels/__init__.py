"""The arithmetic that must be fast: plain torch, with Triton twins in `fused` and `alternation`."""

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Whether the Triton twins can be imported."""
    return importlib.util.find_spec("triton") is not None
