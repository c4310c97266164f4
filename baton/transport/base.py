"""KV movement between processes: one interface, batch-first, and the receiver pulls.

A source *registers* the memory that its blocks live in and *describes* it to a peer in an
:class:`Endpoint`. The peer *connects*, *prepares* a batch of reads, *posts* it, *polls* it
until it is done or its deadline passes, and *releases* it.

Why reads only (DESIGN §7): a one-sided write can't be fenced. A sender that was frozen and
comes back would write into blocks that belong to another request by then. A read can only
hurt its reader, who checks what it got (key, size, checksum, generation) before using it.

Guarantees of every backend:

- After ``poll`` returned DONE the bytes of every span lie in the local region.
- After ``release`` returned, whether the transfer was done or not, the backend will not
  write to the local region on its behalf any more. A backend that cannot promise this for
  an unfinished transfer returns False, and the caller must quarantine the local blocks.
- A transfer that is not DONE at its deadline is FAILED; no peer can keep one pending.
- DONE says nothing about *which* bytes arrived: a dead peer's memory may read as anything.
  Only a matching checksum, announced by a live peer, makes a block good.

Legal order: register -> export; connect -> prepare -> post -> poll* -> release;
disconnect; close. ``release`` is legal in every state after ``prepare`` and idempotent.
Methods may be called from any one thread at a time per transfer. ``post`` may take as long as
the copy (see ``copies_in_post``); nothing else waits, neither for a peer nor for a ``post``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from baton.core.kv_transfer import Endpoint as Endpoint

MAX_RANGES = 65_536
"""Spans of one transfer; a batch that is larger is a bug of the caller (64 Ki blocks)."""


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of this process that blocks live in; it must outlive the transport.

    ``file_descriptor`` names the memory file behind host memory (``-1``: none), so that
    another process of the same host can map it. ``device`` is ``cpu`` or ``cuda:<i>``.
    """

    address: int
    size_bytes: int
    device: str = "cpu"
    file_descriptor: int = -1


@dataclass(frozen=True, slots=True)
class TransferRange:
    """``size_bytes`` from ``remote_offset`` of the peer's region to ``local_offset`` of ours."""

    remote_offset: int
    local_offset: int
    size_bytes: int


class TransferState(StrEnum):
    PREPARED = "prepared"
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """``local_only``: both sides must be on one host. ``devices``: which memory it can read
    and write. ``copies_in_post``: whether ``post`` may take as long as copying the bytes, so
    that an event loop leaves it to a thread. ``waits_in_post``: whether it may also wait for
    another ``post`` to end, so that an event loop leaves even a small one to a thread.
    """

    local_only: bool
    devices: frozenset[str]
    copies_in_post: bool
    waits_in_post: bool = False


class Peer(Protocol):
    """A connected endpoint; opaque."""

    @property
    def endpoint(self) -> Endpoint: ...


class Transfer(Protocol):
    """One batch of reads; opaque but for these."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def error(self) -> str:
        """Why it FAILED; empty otherwise."""
        ...


class Transport(Protocol):
    """One backend in one process, bound to one local region. See the module's docstring."""

    @property
    def name(self) -> str: ...

    def capabilities(self) -> Capabilities: ...

    def register(self, region: Region) -> None:
        """Makes ``region`` readable by peers and writable by our own reads. Once.

        Raises Invalid when the backend cannot serve that kind of memory, Unavailable when
        the backend itself cannot start.
        """
        ...

    def export(self) -> Endpoint:
        """What peers connect with. After ``register``."""
        ...

    def connect(self, endpoint: Endpoint) -> Peer:
        """Connects, or returns the peer that is connected already (same owner, generation).

        Raises Unavailable when the peer can't be reached, Invalid for another backend's
        or a malformed endpoint.
        """
        ...

    def disconnect(self, peer: Peer) -> None:
        """Forgets the peer and what was cached for it. Unfinished transfers FAIL."""
        ...

    def idle_peers(self) -> Sequence[Peer]:
        """The connected peers from which no read is under way."""
        ...

    def prepare(
        self, peer: Peer, spans: Sequence[TransferRange], timeout_seconds: float
    ) -> Transfer:
        """A batch of reads. Neighbouring spans are coalesced.

        Raises Invalid for no span, more than MAX_SPANS, or one outside either region.
        """
        ...

    def post(self, transfer: Transfer) -> None:
        """Starts it; the deadline counts from here. Failure shows in ``poll``."""
        ...

    def poll(self, transfer: Transfer) -> TransferState: ...

    def release(self, transfer: Transfer) -> bool:
        """Ends it in whatever state. False: the local blocks must be quarantined."""
        ...

    def estimate_seconds(self, peer: Peer, size_bytes: int) -> float:
        """From a moving average of what was measured on this link, or a stated prior."""
        ...

    def close(self) -> None: ...


def coalesce(spans: Sequence[TransferRange]) -> list[TransferRange]:
    """Joins spans that are neighbours on both sides; keeps the order of the rest."""
    joined: list[TransferRange] = []
    for span in spans:
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
