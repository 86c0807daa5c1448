"""Asking the Hugging Face hub: with patience where it is busy, and one sentence where it refuses."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from anisoscope.errors import ModelError

T = TypeVar("T")

# The client gives some of its calls no timeout at all, and repeats only some of them.
ANSWER_SECONDS = 120.0
PAUSES = (1.0, 4.0)


def ask_hub(what: str, call: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call the hub's client; ask again where that may help, and explain what cannot be had."""
    for pause in (*PAUSES, None):
        try:
            return _within(ANSWER_SECONDS, lambda: call(*args, **options))
        except Exception as error:
            if pause is None or not is_passing(error):
                raise _explained(what, error) from error
            time.sleep(pause)
    raise AssertionError("the last pause is None")


def is_passing(error: BaseException) -> bool:
    """Whether a failure may be gone a moment later: the network, a busy server, a cut download."""
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError):
        return error.__cause__ is not None and is_passing(error.__cause__)
    if isinstance(error, HfHubHTTPError):
        status = getattr(error.response, "status_code", None)
        return status in (408, 429, 500, 502, 503, 504)
    if isinstance(error, EntryNotFoundError):
        return False
    # The client's HTTP library has a tree of errors of its own, and its name has changed with the client's version.
    return isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.split(".")[0] in (
        "httpx",
        "httpx2",
        "httpcore",
        "requests",
        "urllib3",
    )


def _explained(what: str, error: Exception) -> Exception:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return ModelError(f"{what}: the hub wants you to accept its terms and log in with `hf auth`")
    if isinstance(error, RevisionNotFoundError):
        return ModelError(f"{what}: the hub has no such revision")
    if isinstance(error, RepositoryNotFoundError):
        return ModelError(f"{what}: no local folder and no hub model (or a private one: log in with `hf auth`)")
    if is_passing(error):
        return ModelError(f"{what}: the hub cannot be reached: {error or type(error).__name__}")
    return error


def _within(seconds: float, call: Callable[[], T]) -> T:
    answer: list[T] = []
    problem: list[BaseException] = []

    def work() -> None:
        try:
            answer.append(call())
        except BaseException as error:
            problem.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if problem:
        raise problem[0]
    if not answer:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return answer[0]
