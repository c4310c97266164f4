"""Checks that every backend makes before a transfer."""

from collections.abc import Sequence

from baton.core.kv_transfer import Endpoint
from baton.errors import Invalid
from baton.transport.base import MAX_RANGES, Region, TransferRange, coalesce


def validated_ranges(
    ranges: Sequence[TransferRange], local: Region, remote: Endpoint
) -> list[TransferRange]:
    """Return the ranges, with adjacent ones joined. Raises Invalid for no or too many ranges, an
    empty range, or one that lies outside the local or the remote region."""
    if not 0 < len(ranges) <= MAX_RANGES:
        raise Invalid(f"a transfer must have 1 to {MAX_RANGES} ranges, not {len(ranges)}")
    for span in ranges:
        if span.size_bytes <= 0:
            raise Invalid(f"{span} is empty: a range must have at least one byte")
        is_inside = (
            0 <= span.local_offset <= local.size_bytes - span.size_bytes
            and 0 <= span.remote_offset <= remote.region_size_bytes - span.size_bytes
        )
        if not is_inside:
            raise Invalid(
                f"{span} does not fit in the local region ({local.size_bytes} bytes) or the remote "
                f"one ({remote.region_size_bytes} bytes)"
            )
    return coalesce(ranges)


def expect_transport(endpoint: Endpoint, name: str) -> None:
    """Raises Invalid if the endpoint belongs to another backend."""
    if endpoint.transport != name:
        raise Invalid(f"the endpoint belongs to transport {endpoint.transport!r}, not {name!r}")
