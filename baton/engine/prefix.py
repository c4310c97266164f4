"""The chain of block keys of one sequence, computed once and extended as it grows."""

from collections import OrderedDict
from collections.abc import Sequence

from baton.core.block_key import next_key
from baton.core.ids import BlockKey, RequestId, TokenId
from baton.core.request import RequestSpec

MAX_REMEMBERED_CHAINS = 256
"""Requests between their first question and their entry; 50 KB each at 16k tokens."""


class KeyChain:
    """Keys of the full blocks of a sequence of tokens that only ever grows."""

    __slots__ = ("_block_tokens", "_root", "keys")

    def __init__(self, root: BlockKey, block_tokens: int) -> None:
        self._root = root
        self._block_tokens = block_tokens
        self.keys: list[BlockKey] = []

    def extend(self, token_ids: Sequence[TokenId]) -> None:
        """Adds the keys of blocks that ``token_ids`` (the whole sequence) has filled since."""
        size = self._block_tokens
        while (len(self.keys) + 1) * size <= len(token_ids):
            start = len(self.keys) * size
            previous = self.keys[-1] if self.keys else self._root
            self.keys.append(next_key(previous, token_ids[start : start + size]))


class ChainMemo:
    """Chains of requests that are not in the engine yet: a request is looked up before it is
    added, and a reservation that doesn't fit is tried again after every step."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._chains: OrderedDict[RequestId, tuple[RequestSpec, KeyChain]] = OrderedDict()

    def get(self, spec: RequestSpec, root: BlockKey) -> KeyChain:
        """The chain of ``spec.token_ids``, remembered until :meth:`forget`."""
        remembered = self._chains.get(spec.request_id)
        if remembered is not None and _same_prefix(remembered[0], spec):
            return remembered[1]
        chain = KeyChain(root, self._block_tokens)
        chain.extend(spec.token_ids)
        self._chains[spec.request_id] = (spec, chain)
        if len(self._chains) > MAX_REMEMBERED_CHAINS:
            self._chains.popitem(last=False)
        return chain

    def forget(self, request_id: RequestId) -> None:
        """The request has entered, and its chain grows with its answer from now on."""
        self._chains.pop(request_id, None)


def _same_prefix(one: RequestSpec, other: RequestSpec) -> bool:
    return one.token_ids == other.token_ids and one.tenant_salt == other.tenant_salt
