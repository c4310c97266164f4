"""The router's limits side by side: what each bounds, and why. The limits on fields of requests
stand with their schemas, and what an operator may change is in the router's settings."""

# HTTP

MAX_TARGET_BYTES = 8192  # of a request; the API's routes have less than a hundred
MAX_PIPELINED_BYTES = 64 * 1024  # kept until the current request is answered
MULTIPART_OVERHEAD_BYTES = 64 * 1024  # of a form, besides the uploaded file
UNMETERED_BYTES = 32 * 1024  # of a body or a stored response; small ones are always served
MAX_ERRORS = 1000  # described; 100,000 would block the event loop for 0.25 s
UNCHECKED_BYTES = 32 * 1024  # a body up to this size is parsed within a millisecond
MAX_STRINGS = 131_072  # of a body, with keys; the most messages allowed need 3/4
MAX_VALUES = 262_144  # of a body, besides token ids: ``json_limits.max_json_values``
MAX_NESTING = 128  # levels; encoders fail at 254, the parser at 200; requests have ten
MAX_FRAMING_BYTES = 4096  # chunk extensions and trailers; proxies send a few dozen
MAX_SMALL_CHUNKS = 8192  # of any size; each takes some microseconds to parse
SMALL_CHUNK_BYTES = 64  # of data allow one more chunk
STEP_BYTES = 64 * 1024  # decompressed in a step, 0.1 ms; then the size is checked
STEP_INPUT_BYTES = 16 * 1024  # compressed bytes per step: 1 ms if all are tables
MAX_PARTS = 16  # of a form
MAX_FIELD_BYTES = 4096  # of a form's field, and of a part's headers
MAX_FILENAME_CHARACTERS = 255  # as in most file systems; lists repeat 10,000 of them
MAX_BOUNDARY_CHARACTERS = 70  # RFC 2046
MAX_IGNORED_FIELDS = 64  # of a body; comparing one with all known takes 0.3 ms
MAX_NAMES_IN_HEADER = 16  # ignored fields that a response names
MAX_FIELD_CHARACTERS = 64  # shown of an ignored field, or compared for a typo
PIECE_BYTES = 64 * 1024  # sent of a large body before its client has read what came before
NOTSENT_LOWAT_BYTES = 64 * 1024  # unsent in the kernel per connection; shows slow readers early
STARTS_PER_ITERATION = 8  # connections; their first requests take some milliseconds
ACCEPTS_PER_ITERATION = 64  # taken off the kernel's queue, ten microseconds each
RESERVED_OPEN_FILES = 512  # besides clients' connections: streams to workers, logs
MAX_LOGGED_PATH = 256  # characters
MAX_PEER_ROUTERS = 64  # that are asked
MAX_PEER_ANSWER_BYTES = 4 * 2**20  # of one of them
MAX_MESSAGE_CHARACTERS = 1000  # sent of an error or a field name, which may repeat the input
MAX_RETRY_AFTER_SECONDS = 7 * 24 * 3600.0  # told to a client
MAX_SPREAD_SECONDS = 10.0  # between retries after refusals: room for thousands of clients
MAX_ADMIN_BODY_BYTES = 4096  # of an administrator's request
MAX_LOADING_SECONDS = 30.0  # that a request waits until a worker has loaded an adapter
MAX_REMOVAL_SECONDS = 5.0  # until no worker announces it; workers take a second or two

# Tenants

MAX_TRACKED_TENANTS = 65_536  # of some 500 bytes; beyond, idle ones are forgotten
MAX_TENANT_LABELS = 100  # ten time series each; further tenants are labelled ``other``
MAX_LOGGED_TENANTS = 4096  # whose ignored fields are logged
MAX_LOGGED_FIELDS = 64  # of a tenant; invented names must not fill the log
MAX_TENANTS_FILE_BYTES = 16 * 2**20  # enough for about 60,000 tenants
MAX_MODELS_PER_TENANT = 1024  # in the tenants file
MAX_KEYS_PER_TENANT = 64  # several are needed to rotate keys; more are a mistake
MAX_REQUESTS_PER_SYNC = 200  # tenants in an exchange: some milliseconds of Redis
MAX_COUNTERS_PER_FLUSH = 2000  # in a message: some milliseconds of Redis
MAX_PENDING_COUNTERS = 100_000  # 200 bytes each; days without the store, then ``other``
MAX_USAGE_DAYS = 400  # of usage that are kept, and that a report covers
BYTES_PER_ITERATION = 16 * 1024  # tokenised per turn of the loop: 7 ms; fewer cost more CPU

# Files and batches

MAX_DOWNLOADS = 128  # at once; an open file each, a quarter of RESERVED_OPEN_FILES
MAX_TENANT_DOWNLOADS = 8  # a deleted file takes room until its downloads end
MAX_EXTRA_RESERVED_BYTES = 8 * 2**20  # ahead for an upload of unknown size
MAX_UPLOAD_SECONDS = 24 * 3600.0  # after which an unfinished upload counts as abandoned
DISK_THREADS = 4  # for clients' requests about files and batches; a disk may be slow
MAX_BATCH_BODY_BYTES = 64 * 1024  # to create a batch, whose requests are in a file
MAX_BATCH_REQUESTS = 50_000  # OpenAI's limit
MAX_UNFINISHED_BATCHES = 100  # of a tenant
MAX_BATCHES = 1000  # of a tenant; listing them takes 50 ms; the oldest finished go
MAX_CONCURRENT_BATCH_REQUESTS = 256  # each holds a body and a response in memory
MAX_BACKOFF_SECONDS = 60.0  # after refused requests; from one second, it doubles
MAX_CUSTOM_ID_CHARACTERS = 512  # of a line's ``custom_id``
MAX_LINE_ERROR_CHARACTERS = 500  # about an invalid line, parts of which it repeats
MAX_ROUTER_DEATHS = 2  # during a request, which is then not retried

# Generation

MAX_CHOICES = 128  # of a prompt: ``n`` and ``best_of``
MAX_MIGRATIONS = 64  # away from draining workers; further ones count as failures
MAX_WORKER_DEATHS = 2  # during a request, which then continues in isolation
MAX_ISOLATION_WAIT_SECONDS = 15.0  # for a time without deaths (MIN_SECONDS_SINCE_DEATH)
MAX_SEQUENTIAL_RUNS = 16  # requests in isolation per run that may take place at a time
MAX_SUSPECTS = 4096  # requests with a record of deaths; some hundred bytes each
MAX_RECORDS = 4096  # of answers, 5 KB each; the oldest is dropped first
MAX_FINISHED_RECORDS = 2048  # in the order of their ends
MAX_KEPT_TOKENS = 262_144  # of an answer, 1 MiB in Redis; others are generated again
MAX_TENANT_KEPT_TOKENS = 2**22  # in a minute, by a router: 16 MiB, a 16th of Baton's Redis
MAX_DIGITS = 19  # of a counter in Redis, or of a number that a worker sends
MAX_EARLY_OUTPUTS = 4096  # of half a minute; the first token is there by then
MAX_QUEUED_OUTPUTS = 8192  # some hundred bytes each; only a client delays the reader
MAX_QUEUED_LOGPROBS = 16_384  # 780 tokens with 20: ten seconds, 0.3 MB
PACKED_OUTPUTS = 32  # packed into a message; as objects, 60 streams took 115 MB
MAX_DETAIL_CHARACTERS = 16_384  # of an output's ``details``, names and values
MAX_ERROR_CHARACTERS = 4096  # of a worker's error
MAX_WORKER_RETRY_SECONDS = 3600.0  # a worker's longer delay counts as 1 s
MAX_WAIT_BACKOFF_SECONDS = 1.0  # a thousand waiting requests are bearable, and soon notice
MAX_OPEN_SECONDS = 60.0  # of a circuit breaker
MAX_UNSENT_MESSAGES = 16_384  # to a worker, which is then considered gone
MAX_CONDUCTOR_CHANNELS = 16  # open at once
MAX_CACHED_HASHERS = 1024  # per variant, adapter, salt and fidelity; some hundred bytes
MAX_PENDING_PINS = 256  # prefixes; further ones are recorded as not pinned
MAX_STORES = 64  # connections; also the number that the console shows
MAX_PIN_RETRY_SECONDS = 2.0  # between attempts to pin a prefix

# Forwarded requests

MAX_FORWARDED_KEYS = 64  # parts of a chat by which it is placed; the conductor counts as many
MAX_USAGE_BYTES = 4096  # of an answer's usage, which may come in two pieces
MAX_EVENT_BYTES = 2**20  # of a stream's event that is read whole; logprobs take some kilobytes

# Console

MAX_PAGES = 16  # connected at once
MAX_SHOWN_CONDUCTORS = 8  # that are asked and shown
MAX_SHOWN_MODELS = 64  # whose plans are read, and that the chat offers
MAX_SHOWN_REQUESTS = 500  # in progress; those that began first
MAX_SHOWN_ENDED = 30  # answers; the latest
MAX_RING_WORKERS = 64  # of a model's ring; computing a new one takes 0.5 ms for each
MAX_SHOWN_POOL_WORKERS = 512  # of the supervisor
MAX_SHOWN_WORKERS = 2048  # about 400 bytes each in a frame
MAX_SHOWN_CHARACTERS = 300  # of a text from another process
MAX_SHOWN_TENANTS = 100  # those that use most now come first
