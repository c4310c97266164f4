"""The checks of a transfer's memory ranges, which every backend makes before the transfer."""

from collections.abc import Sequence

from baton.core.kv_transfer import Endpoint
from baton.errors import Invalid
from baton.transport.base import MAX_RANGES, Region, TransferRange, coalesce


def validated_ranges(
    ranges: Sequence[TransferRange], local: Region, remote: Endpoint
) -> list[TransferRange]:
    """Return the ranges, with adjacent ranges joined. Raises Invalid if there are no ranges or too
    many, or if a range is empty or lies outside the local or the remote region."""
    if not 0 < len(ranges) <= MAX_RANGES:
        raise Invalid(f"a transfer must have 1 to {MAX_RANGES} ranges, not {len(ranges)}")
    for span in ranges:
        if span.size_bytes <= 0:
            raise Invalid(f"{span} is empty: a range must have at least one byte")
        for side, offset, region_bytes in (
            ("local", span.local_offset, local.size_bytes),
            ("remote", span.remote_offset, remote.region_size_bytes),
        ):
            if not 0 <= offset <= region_bytes - span.size_bytes:
                raise Invalid(
                    f"{span} lies outside the {side} region, which has {region_bytes} bytes"
                )
    return coalesce(ranges)


def expect_transport(endpoint: Endpoint, name: str) -> None:
    """Raise Invalid unless the endpoint belongs to the transport ``name``."""
    if endpoint.transport != name:
        raise Invalid(f"the endpoint belongs to transport {endpoint.transport!r}, not {name!r}")
