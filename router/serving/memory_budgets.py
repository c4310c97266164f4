"""Limits on what a router keeps in memory for its requests: logprobs, and stored responses."""

from collections.abc import Iterable

from baton.concurrency.budget import Budget, BudgetShare
from baton.core.ids import TenantId
from baton.core.request import MAX_PROMPT_LOGPROBS, count_logprobs
from baton.errors import Invalid, Overloaded
from router.limits import UNMETERED_BYTES
from router.serving.choice_stream import TokenEntry

MAX_KEPT_LOGPROBS = 8 * MAX_PROMPT_LOGPROBS
"""The maximum number of logprobs of all requests in flight, alternatives included: 24,966 tokens
with 20 alternatives each. A logprob takes some 100 bytes until its answer is encoded, 300 bytes in
an item of a response, and up to 500 bytes while its answer is encoded. So all of them take 50 MB
while the answers are generated, and up to 260 MB if they are all encoded at the same time. Without
alternatives, a token takes 170 to 700 bytes, so these are 90 and 370 MB."""

MAX_REQUEST_LOGPROBS = MAX_KEPT_LOGPROBS // 2
"""The maximum for one request, for example an answer of 8,192 tokens with 20 alternatives each
(172,032), or 128 answers of 1,024 tokens with one alternative (262,144). A request that needs more
is refused for good, since it would exceed the budget whenever the client retried it."""


class LogprobsBudget(Budget):
    """Limits how many logprobs are kept for requests that are not answered yet: those of prompts,
    and those of answers that are sent as a whole or, in the Responses API, repeated at their end.
    The limit holds in total and per tenant (weighted max-min fairness, see :class:`Budget`).
    Not thread-safe: use it on one event loop."""

    def __init__(
        self, limit: int = MAX_KEPT_LOGPROBS, request_limit: int = MAX_REQUEST_LOGPROBS
    ) -> None:
        super().__init__(limit, "logprobs of unfinished requests")
        self._request_limit = request_limit

    def new_request(
        self, tenant: TenantId, weight: float, param: str, *, shared: bool
    ) -> "KeptLogprobs":
        """Return an object that counts the logprobs of one request. ``param`` is the field with the
        number of alternatives, for errors. ``shared`` says whether more than one tenant is
        configured."""
        return KeptLogprobs(self, self._request_limit, tenant, weight, param, shared)


class KeptLogprobs(BudgetShare):
    """The logprobs that one request keeps, which count against a budget. Leaving the ``with``
    block, or :meth:`release`, returns them to the budget."""

    __slots__ = ("_limit", "_param")

    def __init__(
        self,
        budget: Budget,
        limit: int,
        tenant: TenantId,
        weight: float,
        param: str,
        shared: bool,
    ) -> None:
        super().__init__(budget, tenant, weight, shared)
        self._limit = limit
        self._param = param

    def keep(self, entries: Iterable[TokenEntry]) -> None:
        """Count the logprobs of these tokens. Raises the errors of :meth:`charge`."""
        self.charge(count_logprobs(entry.logprob for entry in entries))

    def charge(self, count: int) -> None:
        """Count ``count`` more logprobs. Raises Overloaded when the budget is exhausted, and
        Invalid if the request has too many logprobs by itself; nothing is counted then."""
        if self._num_held + count > self._limit:
            raise Invalid(
                f"{self._param}: the request has more than {self._limit} logprobs, alternatives "
                "included, which is the most that is kept for one request; ask for fewer answers, "
                f"tokens or {self._param}, or stream a chat or completion, for which no logprobs "
                "of the answer are kept",
                param=self._param,
            )
        try:
            self._acquire(count)
        except Overloaded as error:
            raise Overloaded(
                f"{error}; retry later, ask for fewer alternatives (top_logprobs, logprobs, "
                "prompt_logprobs), or stream a chat or completion, for which no logprobs of the "
                "answer are kept",
                retry_after_seconds=error.retry_after_seconds,
            ) from error


MAX_READ_BYTES = 128 * 2**20
"""The maximum size of the stored responses that are read, decoded or sent at the same time: eight
of the largest. A response may be in memory twice while it is sent."""


class StoredBytesBudget(Budget):
    """Limits how many bytes of stored responses and of lists of files are in memory for requests:
    from before a response is read until it is decoded, or until the client has read it, which a
    client can delay for hours. The limit holds in total and per tenant (weighted max-min fairness,
    see :class:`Budget`). Not thread-safe: use it on one event loop."""

    def __init__(self, limit_bytes: int = MAX_READ_BYTES) -> None:
        super().__init__(limit_bytes, "bytes of stored responses and lists of files")

    def new_share(self, tenant: TenantId, weight: float, *, shared: bool) -> "StoredBytesShare":
        """Return the share of one request. ``shared`` says whether more than one tenant is
        configured."""
        return StoredBytesShare(self, tenant, weight, shared)


class StoredBytesShare(BudgetShare):
    """The bytes of stored responses that one request has in memory. Leaving the ``with`` block, or
    :meth:`release`, returns them to the budget."""

    __slots__ = ()

    def require(self, size_bytes: int) -> None:
        """Hold memory for ``size_bytes`` in total, if it is more than is held so far. Raises
        Overloaded, and holds no more than before, when the budget is exhausted."""
        self._acquire(max(size_bytes - UNMETERED_BYTES - self._num_held, 0))
