"""The conductor's limits side by side: what each bounds, and why. The margins and shares that the
policy decides by are in ``conductor/policy``."""

# Requests and workers

MAX_REPORT_AGE_SECONDS = 10.0  # of a report, or the registry's answer; older ones are outdated
MAX_CACHED_ADAPTERS = 1024  # whose workers are remembered between reads of the registry
MAX_UNREPORTED = 4096  # requests per worker since its report; older ones are not counted
MAX_QUEUE_ENTRIES = 256  # of a worker that sends no reports; each decision reads several queues
MAX_ADVANCED_WORKERS = 32  # at once, several microseconds each; a decision waits for them
MAX_MEASUREMENT_AGE_SECONDS = 60.0  # then the pool's cost counts, or a slow worker stays unused
MAX_MODELS = 256  # whose loads and caches are remembered; then those without workers go

# Caches

MAX_INDEXED_KEYS = 262_144  # of an index, 40 to 100 MB; the least recently sent go
MAX_INDEXED_PAIRS = 4 * MAX_INDEXED_KEYS  # key and worker; all keys at 128 workers would be 1 GB
MAX_EVICTED_PER_CALL = 1024  # keys, so that no decision takes long after a pool has shrunk
MAX_NODE_BLOCKS = 1 << 26  # of a node: 1 GB. None has so many, but a broken one may say so
