"""The store node's limits side by side: what each bounds, and why. Sizes of tiers and quotas are in
the node's settings."""

# Requests

MAX_PUTS = 16  # at once; a further put is rejected
MAX_PROMOTIONS = 4  # leases that wait for the disk; a further one gets what is in DRAM
MAX_WAIT_SECONDS = 4.0  # for room; then blocks go without a copy. Workers give a put 10 s
MAX_LEASES = 65_536  # at once
MAX_LEASED_REFERENCES = 4_194_304  # blocks of all leases, about 32 MB; once for each lease
MAX_LEASE_SECONDS = 60.0  # of one lease
MIN_EXPIRIES = 1024  # up to which the expiries of released leases are kept
MAX_PIN_SECONDS = 24 * 3600.0  # of one pin
MAX_PINNED_SHARE = 0.5  # of the arena, and of a tenant's quota; the rest stays evictable

# Blocks and tiers

MAX_RAW_BYTES = 64 * 1024 * 1024  # of a block; 80 layers with 8 heads of 128 have 5 MiB in BF16
MAX_FORMATS = 8  # whose codecs and buffers are kept
MIN_SLAB_BYTES = 4 * 1024 * 1024  # of a slab, unless the arena is small
MAX_SLAB_BYTES = 64 * 1024 * 1024  # of a slab
MIN_SLABS_PER_ARENA = 8  # which several slot sizes share
BATCH_BYTES = 16 * 1024 * 1024  # written at a time; a block can't be evicted meanwhile
MIN_SEGMENT_BYTES = 64 * 1024  # of a segment on a small disk

# Events and index

MAX_MERGED_KEYS = 65_536  # of changes in a call, which is sent again if it fails
