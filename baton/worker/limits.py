"""The workers' limits side by side: what each bounds, and why. What an operator may change is in
the workers' settings."""

from baton.core.request import MAX_PROMPT_LOGPROBS
from baton.rpc.frames import MAX_MESSAGE_BYTES

# Requests

MAX_COMMANDS = 8192  # that wait for a step to end; a request takes about three
MAX_CONCURRENT_GRAMMARS = 2  # compiled in threads; a tenant uses at most one
MAX_WAITING_GRAMMARS = 1024  # for a thread; a quarter of them for one tenant
MAX_INLINE_HASH_TOKENS = 4096  # hashed in the event loop, 0.5 ms; more in a thread
MAX_ADAPTER_RETRY_SECONDS = 600.0  # doubled up to this; reading one takes seconds of a core

# Outputs

MAX_UNREAD_OUTPUTS = 65_536  # about 25 MB; the router is gone or hopelessly behind
MAX_UNREAD_LOGPROBS = 8 * MAX_PROMPT_LOGPROBS  # 80 MB: all that a router requests for prompts
MAX_MESSAGE_WEIGHT = 4_096  # outputs and logprobs: 10 ms to encode, 200 kB; one may have more
MAX_CHUNK_EVENTS = 128  # of a span; OpenTelemetry's limit
MAX_DESCRIPTION_CHARACTERS = 200  # of the computing software that a worker announces
MAX_SAMPLE_BLOCKS = 256  # by which codecs are measured

# Prefix store

MAX_CHAINED_KEYS = 2**18  # some tens of megabytes; few devices have so many blocks
MAX_UNPUBLISHED = 256  # runs of blocks; further ones are dropped, it is only a cache
MAX_STORE_CALL_BYTES = 64 * 1024 * 1024  # pinned for a put, or read as one piece
MAX_SPLIT_FETCHES = 8  # at once
MIN_FETCH_TIMEOUT_SECONDS = 10.0  # of one prefix
MAX_FETCH_TIMEOUT_SECONDS = 120.0  # of one prefix

# Mock workers

MAX_UNCLAIMED_PROMPTS = 4096  # prefilled, without a decode worker; the oldest go first
MAX_UNREAD_BYTES = MAX_MESSAGE_BYTES // 4  # some 80,000 tokens; the router is gone or far behind
MAX_DISTINCT_TOKENS = 4096  # generated; each is also cached in its encoded form
