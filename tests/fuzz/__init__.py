"""Fuzzers. Every module that has a ``NAME: str`` and a
``fuzz(seconds: float, seed: int) -> FuzzResult`` is a fuzzer.

They are for what Hypothesis and schemathesis (``tests/property/test_router_fuzz.py``) don't
generate: bytes below HTTP, frames and protobuf messages, cluster members that lie, codecs behind
guard pages, grammars in a helper process, and streamed answers that are checked event by event.
They found 468 faults of HTTP, answers from unwritten blocks and a SIGBUS
(docs/results/security.md).

``python -m tests.fuzz`` finds and runs all fuzzers; ``make test`` runs each of them for a second.
"""
