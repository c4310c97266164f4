"""The sizes of the slots in which blocks are stored."""

STEPS_PER_DOUBLING = 16
"""Slot sizes between a block's raw size and half of it, and between each further halving, for sizes
that vary. With few slot sizes, a freed slot fits the next block. At most 1/17 of a slot is unused,
about 1/33 on average."""

FIXED_SIZE_STEPS = 128
"""The same for codecs whose encodings all have one size: at most 1/129 of a slot is unused."""

ALIGNMENT_BYTES = 64


def slot_bytes_for(size_bytes: int, raw_bytes: int, steps: int = STEPS_PER_DOUBLING) -> int:
    """Return the size of the slot for a block of ``size_bytes``, encoded or not, that has
    ``raw_bytes`` when it is not encoded. Raw blocks have slots of their size. There are ``steps``
    sizes per halving."""
    if size_bytes >= raw_bytes:
        return size_bytes
    upper = raw_bytes
    while 2 * size_bytes <= upper:
        upper //= 2
    step = max(upper // (2 * steps), 1)
    aligned = -(-step // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return min(-(-size_bytes // aligned) * aligned, raw_bytes)
