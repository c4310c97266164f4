"""The helper process, which compiles grammars to check them.

``python -m baton.text.grammar.helper_process MEMORY [TOKENIZER_JSON VOCAB_SIZE EOS_IDS]`` reads
jobs from its standard input and writes verdicts to its standard output, one at a time, each a JSON
object prefixed by its length (four bytes, big endian). A grammar that exceeds a limit kills the
process by a signal, from which :mod:`baton.text.grammar.checker` infers the reason: SIGPROF for CPU
time, SIGABRT for memory, SIGSEGV for depth. MEMORY is the limit of its memory in bytes, beyond what
the process uses after its start; 0 where only the checker limits it. The process exits when its
standard input is closed.
"""

import json
import os
import resource
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from time import thread_time
from typing import BinaryIO

from llguidance import LLTokenizer

from baton.core.grammar import Grammar, GrammarKind
from baton.errors import Invalid
from baton.system.heap import trim_heap
from baton.system.stop_signals import ignore_stop_signals
from baton.text.grammar.compilation import (
    compile_grammar,
    invalid_grammar,
    refusal_prefix,
    validate_grammar,
)
from baton.text.grammar.limits import MAX_MESSAGE_CHARACTERS
from baton.text.grammar.schema_fault import find_fault

CPU_SECONDS = 0.5
"""CPU time limit of one grammar. Typical schemas take a millisecond."""

MEMORY_BYTES = 512 << 20
"""Memory limit of one grammar."""

STACK_BYTES = 4 << 20
"""Stack size. The threads that use the grammar afterwards have sixteen times as much."""

FIRST_MASK_SECONDS = 0.05
"""CPU time limit for computing the mask of the first token: no token should take longer."""

FAULT_SECONDS = CPU_SECONDS / 2
"""CPU time after which no further variants of a schema are compiled to find its faulty part."""

LENGTH_BYTES = 4


def main(arguments: list[str]) -> None:
    ignore_stop_signals()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory_bytes, *vocabulary_of = arguments
    vocabulary, wrong = _load(*vocabulary_of) if vocabulary_of else (None, "")
    if int(memory_bytes):
        limit = _virtual_bytes() + int(memory_bytes) + STACK_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # From here on it opens no file: neither one with secrets, such as the environment of the parent
    # in /proc, nor a socket.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    threading.stack_size(STACK_BYTES)
    while (job := read_message(sys.stdin.buffer)) is not None:
        # One thread per job, so that its stack is returned to the system afterwards.
        worker = threading.Thread(target=_write_verdict, args=(vocabulary, wrong, job))
        worker.start()
        worker.join()
        del worker, job
        trim_heap()


def _write_verdict(vocabulary: LLTokenizer | None, always_wrong: str, job: dict[str, str]) -> None:
    try:
        grammar = Grammar(GrammarKind(job["kind"]), job["text"])
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        wrong = always_wrong or _complaint(vocabulary, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(sys.stdout.buffer, {"wrong": wrong})
    except BaseException:
        os._exit(1)  # otherwise the checker would wait for a verdict


def _complaint(vocabulary: LLTokenizer | None, grammar: Grammar) -> str:
    """Return what is wrong with a grammar, or an empty string. What is wrong with a JSON schema
    begins with the path of its faulty part."""
    wrong = _refusal(vocabulary, grammar)
    if not wrong or grammar.kind is not GrammarKind.JSON_SCHEMA:
        return wrong
    path = find_fault(
        json.loads(grammar.text),
        lambda schema: _refusal(vocabulary, replace(grammar, text=json.dumps(schema))),
        lambda: thread_time() < FAULT_SECONDS,
    )
    return f"{path}: {wrong.removeprefix(refusal_prefix(grammar))}" if path else wrong


def _refusal(vocabulary: LLTokenizer | None, grammar: Grammar) -> str:
    """Return why a grammar is refused, or an empty string."""
    try:
        validate_grammar(grammar)
        if vocabulary is not None:
            _compile_first_mask(vocabulary, grammar)
    except Invalid as error:
        return str(error)
    except MemoryError:
        return f"the {grammar.kind.value} takes more than {MEMORY_BYTES >> 20} MiB"
    except BaseException as error:  # a panic in the library is not an Exception
        return f"the {grammar.kind.value} can't be compiled: {type(error).__name__}"
    return ""


def _compile_first_mask(vocabulary: LLTokenizer, grammar: Grammar) -> None:
    """Compile the grammar and compute the first token's mask, as a worker does. Raises Invalid if
    that fails or takes too long, or if no token is allowed."""
    matcher = compile_grammar(vocabulary, grammar)
    began = thread_time()
    bits = matcher.compute_bitmask()
    error = matcher.get_error().split("\n")[0]
    if "NoExtension" in error or not (error or any(bits)):
        raise invalid_grammar(
            grammar,
            "it allows no first token: no text matches it, or it has an unsupported keyword",
        )
    if error:
        raise invalid_grammar(grammar, error)
    seconds = thread_time() - began
    if seconds > FIRST_MASK_SECONDS:
        raise invalid_grammar(
            grammar,
            f"the first token's mask takes {seconds:.2f} s; the limit is {FIRST_MASK_SECONDS:g}",
        )


def _load(path: str, size: str, eos: str) -> tuple[LLTokenizer | None, str]:
    """Return the vocabulary and an empty text; if the tokenizer can't be used, return None and the
    reason."""
    text = Path(path).read_text(encoding="utf-8")
    tokens = [int(token) for token in eos.split(",") if token]
    try:
        return LLTokenizer(text, n_vocab=int(size), eos_token=tokens or None), ""
    except ValueError as error:
        return None, f"grammars can't be enforced with this tokenizer: {error}"[
            :MAX_MESSAGE_CHARACTERS
        ]


def _virtual_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def read_message(file: BinaryIO) -> dict[str, str] | None:
    """Read and return a message; return None at the end of the file."""
    head = file.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    data = file.read(int.from_bytes(head, "big"))
    message: dict[str, str] = json.loads(data)
    return message


def write_message(file: BinaryIO, message: dict[str, str]) -> None:
    data = json.dumps(message).encode()
    file.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
    file.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
