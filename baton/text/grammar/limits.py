"""The limits on grammars side by side: what each bounds, and why. Those on a helper process are in
:mod:`baton.text.grammar.helper_process`."""

# Grammars

MAX_GRAMMAR_BYTES = 64 * 1024  # the longest schemas in use have some thousand
MAX_CHOICES = 2048  # of a list of choices
MAX_DEPTH = 60  # of nested objects and lists; the library supports twice as much
MAX_PATTERN_PROPERTIES = 64  # of a schema; llguidance compares each with all others
MAX_REFERENCES = 1024  # $ref of a schema; llguidance follows a chain recursively
MAX_RULES = 2048  # of a Lark grammar
MAX_ALLOWED_TOKENS = 4096  # with the banned ones, less text than a grammar may have
MAX_BANNED_TOKENS = 2048  # in all banned sequences together
MAX_MESSAGE_CHARACTERS = 500  # of an error, which may quote the grammar

# Work

MAX_WAITING_CHECKS = 256  # for a helper, of up to 64 KiB each
MAX_REMEMBERED_GRAMMARS = 4096  # valid ones, by their digests
MAX_GRAMMARS_PER_HELPER = 1000  # whose heap is fragmented by then
MAX_VERDICT_BYTES = 64 * 1024  # of a helper's answer
MAX_REJECTED_GRAMMARS = 1024  # remembered, since a mask took too long
MAX_COMPILED = 16  # kept: about 1 MB each, 50 MB at worst
MAX_ABANDONED_THREADS = 16  # each of which ends with its job
