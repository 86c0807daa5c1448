"""Windows through a model, some at a time: fewer when memory runs out."""

from collections.abc import Callable

import torch

from anisoscope.errors import ModelError, SpecError


class PassSize:
    """How many windows a pass takes: as many as asked for, and half as many each time memory runs out."""

    def __init__(self, windows: int | None = None) -> None:
        if windows is not None and windows < 1:
            raise SpecError(f"batch_size is at least 1; came {windows}")
        self.windows = windows
        """None until a size is asked for or memory runs out: each pass then takes its own default."""
        self.notes: list[str] = []

    def run(
        self,
        work: Callable[[slice], object],
        *,
        start: int = 0,
        stop: int,
        default: int,
        seq_len: int,
        what: str = "forward pass",
    ) -> None:
        """Call `work` with one slice of the windows from `start` to `stop` after the other.

        Where memory runs out in it, the same windows are tried again, half as many at a time: `work` must add nothing
        to what it keeps before it can no longer fail, or write it where the next attempt overwrites it.
        """
        while start < stop:
            size = min(default if self.windows is None else self.windows, stop - start)
            part = slice(start, start + size)
            try:
                work(part)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                if size == 1:
                    raise ModelError(
                        f"memory ran out at one window of {seq_len} tokens: {error}; "
                        "try a smaller --seq-len, --dtype bfloat16 or --device-map auto"
                    ) from error
            else:
                start = part.stop
                continue
            # Here, and not above: the error holds on to the tensors of the pass that failed.
            self.windows = size // 2
            self.notes.append(f"memory ran out: windows in a {what} halved to {self.windows}")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
