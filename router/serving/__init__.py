"""What the APIs have in common: from a request's headers to the encoder of its answer.

Each API (OpenAI's in :mod:`router.openai`, :mod:`router.responses`, :mod:`router.anthropic`) parses
its own requests and encodes its own answers and errors; everything between is here."""
