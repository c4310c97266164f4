"""Checks that every backend makes before a transfer."""

from collections.abc import Sequence

from baton.core.kv_transfer import Endpoint
from baton.errors import Invalid
from baton.transport.base import MAX_RANGES, Region, TransferRange, coalesce


def validated_ranges(
    ranges: Sequence[TransferRange], local: Region, remote: Endpoint
) -> list[TransferRange]:
    """The ranges, with adjacent ones joined. Raises Invalid for no or too many ranges, or one that
    lies outside the local or the remote region."""
    if not 0 < len(ranges) <= MAX_RANGES:
        raise Invalid(f"a transfer must have 1 to {MAX_RANGES} ranges, not {len(ranges)}")
    for span in ranges:
        is_inside = (
            span.size_bytes > 0
            and 0 <= span.local_offset <= local.size_bytes - span.size_bytes
            and 0 <= span.remote_offset <= remote.region_size_bytes - span.size_bytes
        )
        if not is_inside:
            raise Invalid(
                f"{span} lies outside its regions of {local.size_bytes} (local) and "
                f"{remote.region_size_bytes} bytes (remote)"
            )
    return coalesce(ranges)


def expect_transport(endpoint: Endpoint, name: str) -> None:
    """Raises Invalid if the endpoint belongs to another backend."""
    if endpoint.transport != name:
        raise Invalid(f"the endpoint belongs to transport {endpoint.transport!r}, not {name!r}")
