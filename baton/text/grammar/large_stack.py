"""Runs deeply recursive calls in a thread with a large stack."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.text.grammar.mask_threads import STACK_BYTES

Result = TypeVar("Result")


class _Outcome(Generic[Result]):
    result: Result
    error: BaseException | None = None


def call_with_large_stack(call: Callable[[], Result]) -> Result:
    """Run ``call`` in a new thread with a large stack, wait for it, and return its result or raise
    its error."""
    outcome: _Outcome[Result] = _Outcome()

    def run() -> None:
        try:
            outcome.result = call()
        except BaseException as error:
            outcome.error = error

    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name="deep")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if outcome.error is not None:
        raise outcome.error
    return outcome.result
