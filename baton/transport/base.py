"""The interface of KV transports between processes: the receiver reads, in batches.

A source *registers* the memory that its blocks live in and *describes* it to a peer in an
:class:`Endpoint`. The peer *connects*, *prepares* a batch of reads, *posts* it, *polls* it
until it is done or its deadline passes, and *releases* it.

Why reads only: a one-sided write can't be fenced. A sender that was frozen and comes back would
write into blocks that belong to another request by then. A read can only harm its reader, which
checks the data (key, size, checksum, generation) before using it.

Guarantees of every backend:

- After ``poll`` has returned DONE, the bytes of every range are in the local region.
- After ``release`` has returned True, whether the transfer was done or not, the backend does not
  write to the local region for it any more. If it can't guarantee this for an unfinished
  transfer, it returns False, and the caller must quarantine the local blocks.
- A transfer that is not DONE at its deadline is FAILED; no peer can keep it pending.
- DONE says nothing about *which* bytes arrived: a dead peer's memory may read as anything.
  Only a block with a matching checksum, announced by a live peer, may be used.

Legal order: register -> export; connect -> prepare -> post -> poll* -> release; disconnect; close.
``release`` is legal in every state after ``prepare`` and idempotent. For each transfer, methods may
be called from any thread, but only from one thread at a time. ``post`` may take as long as the copy
(see ``copies_in_post``); no other method blocks, neither on a peer nor on a ``post``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from baton.core.kv_transfer import Endpoint as Endpoint

MAX_RANGES = 65_536
"""Maximum number of ranges in one transfer (64 Ki blocks); a larger batch is a bug in the
caller."""


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of this process that contains the blocks; it must outlive the transport.

    ``file_descriptor`` is the memory file behind host memory (``-1``: none), so that another
    process of the same host can map it. ``device`` is ``cpu`` or ``cuda:<i>``.
    """

    address: int
    size_bytes: int
    device: str = "cpu"
    file_descriptor: int = -1


@dataclass(frozen=True, slots=True)
class TransferRange:
    """A range to read: ``size_bytes`` bytes at ``remote_offset`` in the peer's region are copied to
    ``local_offset`` in the local region."""

    remote_offset: int
    local_offset: int
    size_bytes: int


class TransferState(StrEnum):
    PREPARED = "prepared"
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    RELEASED = "released"


GROUP_BYTES = 4 * 1024 * 1024
"""See :class:`Capabilities`."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a backend. ``local_only``: whether both sides must be on one host.
    ``devices``: the kinds of memory that the backend can read and write. ``copies_in_post``:
    whether ``post`` may take as long as copying the bytes, so that an event loop must call it in a
    thread. ``waits_in_post``: whether ``post`` may also wait for another ``post`` to end, so that
    even small transfers need a thread. ``group_bytes``: how many bytes are read at once before they
    are verified. Small groups let one be verified, and from the processor's cache, while the next
    is read; but each costs a switch of threads and, on a GPU, the start of a copy and a kernel.
    """

    local_only: bool
    devices: frozenset[str]
    copies_in_post: bool
    waits_in_post: bool = False
    group_bytes: int = GROUP_BYTES


class Peer(Protocol):
    """A connected peer, as returned by :meth:`Transport.connect`. Attributes that are not declared
    here are private to the backend."""

    @property
    def endpoint(self) -> Endpoint: ...


class Transfer(Protocol):
    """One batch of reads. Attributes that are not declared here are private to the backend."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def error(self) -> str:
        """The reason why the transfer is FAILED; empty if it is not FAILED."""
        ...


class Transport(Protocol):
    """One backend in one process, bound to one local region. The module's docstring has the
    guarantees and the legal order of calls."""

    @property
    def name(self) -> str: ...

    def capabilities(self) -> Capabilities: ...

    def register(self, region: Region) -> None:
        """Let peers read from ``region``, and let this transport's own reads store into it what
        they fetch. Call this once, with the only region.

        Raises Invalid when the backend cannot serve that kind of memory, Unavailable when
        the backend itself cannot start.
        """
        ...

    def export(self) -> Endpoint:
        """Return the endpoint with which peers connect to this transport. Call it after
        ``register``."""
        ...

    def connect(self, endpoint: Endpoint) -> Peer:
        """Connect to the peer that exported ``endpoint``. If a peer with the same owner and
        generation is already connected, return it.

        Raises Unavailable when the peer can't be reached, and Invalid for an endpoint that is
        malformed or belongs to another backend.
        """
        ...

    def disconnect(self, peer: Peer) -> None:
        """Drop the peer and everything that is cached for it. Its unfinished transfers become
        FAILED."""
        ...

    def idle_peers(self) -> Sequence[Peer]:
        """Return the connected peers without unfinished reads."""
        ...

    def prepare(
        self, peer: Peer, ranges: Sequence[TransferRange], timeout_seconds: float
    ) -> Transfer:
        """Prepare a batch of reads. Adjacent ranges are coalesced.

        Raises Invalid if ``ranges`` is empty or has more than MAX_RANGES ranges, or if a range lies
        outside the local or the peer's region.
        """
        ...

    def post(self, transfer: Transfer) -> None:
        """Start the transfer and its timeout. ``poll`` reports failures."""
        ...

    def poll(self, transfer: Transfer) -> TransferState: ...

    def release(self, transfer: Transfer) -> bool:
        """End the transfer, whatever its state is. Return False if it may still write to the local
        blocks; the caller must then quarantine them."""
        ...

    def estimate_seconds(self, peer: Peer, size_bytes: int) -> float:
        """Predict the time of a transfer, from a moving average of measurements on this link, or
        from a fixed prior."""
        ...

    def close(self) -> None: ...


def coalesce(ranges: Sequence[TransferRange]) -> list[TransferRange]:
    """Join ranges that are adjacent on both sides; keep their order."""
    joined: list[TransferRange] = []
    for span in ranges:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.remote_offset + last.size_bytes == span.remote_offset
            and last.local_offset + last.size_bytes == span.local_offset
        ):
            size = last.size_bytes + span.size_bytes
            joined[-1] = TransferRange(last.remote_offset, last.local_offset, size)
        else:
            joined.append(span)
    return joined
