"""The registry's limits side by side: what each bounds, and why."""

# Members and adapters

MAX_MEMBERS = 4096  # of a cluster
MAX_MEMBER_BYTES = 64 * 1024  # of a member's entry
MAX_ID_BYTES = 512  # of a member or an adapter; a pod's name has up to 253
MAX_ADAPTER_BYTES = 8192  # of an adapter's entry
MAX_PATH_CHARACTERS = 4096  # of an adapter's folder
MAX_NUMBER = 1e15  # in a member; a thousand can be added and multiplied
MAX_GENERATION = 2**63 - 1  # nanoseconds since 1970
MIN_RATE = 1e-3  # of a member, per second

# Reading

MAX_REPLY_BYTES = 32 * 1024 * 1024  # of a reply; 4,096 members have 12 MB
MAX_READ_ENTRIES = 4096  # besides known ones, at a time; the others are read later
MAX_READ_BYTES = 4 * 2**20  # of these: some 40 ms of work, with pauses
MAX_LOGGED_ENTRIES = 64  # rejected; the others are not logged
MAX_REDIS_CONNECTIONS = 64  # of one client; further calls wait for a free one
MAX_CONNECTION_SECONDS = 10.0  # then it is renewed: its address may be another's by now
MAX_SCRIPT_CALLS = 64  # of one round trip, for which others wait
MAX_SCRIPT_BYTES = 1 << 20  # of one round trip; a larger call is sent alone
