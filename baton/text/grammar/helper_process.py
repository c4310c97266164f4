"""Compiles grammars in a process of its own.

``python -m baton.text.grammar.helper_process [TOKENIZER_JSON VOCAB_SIZE EOS_IDS]`` reads jobs from
its standard input and writes verdicts to its standard output, one at a time, each a JSON object
behind its length (four bytes, big endian). A grammar that takes too much ends the process by a
signal, which tells :mod:`baton.text.grammar.checker` what it was: SIGPROF for processor time,
SIGABRT for memory, SIGSEGV for depth. It ends when its standard input does.
"""

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from time import thread_time
from typing import BinaryIO

from llguidance import LLTokenizer

from baton.core.grammar import Grammar, GrammarKind
from baton.errors import Invalid
from baton.system.heap import trim_heap
from baton.text.grammar.compilation import (
    MAX_MESSAGE,
    compile_grammar,
    invalid_grammar,
    validate_grammar,
)

CPU_SECONDS = 0.5
"""Of one grammar. Schemas in use take a millisecond."""

MEMORY_BYTES = 512 << 20
"""Of one grammar, beyond what the process has after its start."""

STACK_BYTES = 4 << 20
"""Whoever follows the grammar afterwards has sixteen times as much."""

FIRST_MASK_SECONDS = 0.05
"""Of a processor, to say which tokens may come first: no token should take longer."""

LENGTH_BYTES = 4


def main(arguments: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary, wrong = _load(*arguments) if arguments else (None, "")
    limit = _virtual_bytes() + MEMORY_BYTES + STACK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    threading.stack_size(STACK_BYTES)
    while (job := read_message(sys.stdin.buffer)) is not None:
        # A thread for each, so that its stack goes back to the system with it.
        worker = threading.Thread(target=_answer, args=(vocabulary, wrong, job))
        worker.start()
        worker.join()
        del worker, job
        trim_heap()


def _answer(vocabulary: LLTokenizer | None, always_wrong: str, job: dict[str, str]) -> None:
    try:
        grammar = Grammar(GrammarKind(job["kind"]), job["text"])
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        wrong = always_wrong or _complaint(vocabulary, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(sys.stdout.buffer, {"wrong": wrong})
    except BaseException:
        os._exit(1)  # else whoever asked would wait for a verdict


def _complaint(vocabulary: LLTokenizer | None, grammar: Grammar) -> str:
    """Empty when there is none."""
    try:
        validate_grammar(grammar)
        if vocabulary is not None:
            _try(vocabulary, grammar)
    except Invalid as error:
        return str(error)
    except MemoryError:
        return f"the {grammar.kind.value} takes more than {MEMORY_BYTES >> 20} MiB"
    except BaseException as error:  # a panic of the library is no Exception
        return f"the {grammar.kind.value} can't be compiled: {type(error).__name__}"
    return ""


def _try(vocabulary: LLTokenizer, grammar: Grammar) -> None:
    """As a worker does, up to the answer's first token. Raises Invalid."""
    matcher = compile_grammar(vocabulary, grammar)
    began = thread_time()
    bits = matcher.compute_bitmask()
    error = matcher.get_error().split("\n")[0]
    if "NoExtension" in error or not (error or any(bits)):
        raise invalid_grammar(
            grammar,
            "it allows no first token: no text fits it, or it has a keyword that can't be followed",
        )
    if error:
        raise invalid_grammar(grammar, error)
    seconds = thread_time() - began
    if seconds > FIRST_MASK_SECONDS:
        raise invalid_grammar(
            grammar, f"its first token takes {seconds:.2f} s, of {FIRST_MASK_SECONDS:g}"
        )


def _load(path: str, size: str, eos: str) -> tuple[LLTokenizer | None, str]:
    """The vocabulary, or why no grammar can be followed with it."""
    text = Path(path).read_text(encoding="utf-8")
    tokens = [int(token) for token in eos.split(",") if token]
    try:
        return LLTokenizer(text, n_vocab=int(size), eos_token=tokens or None), ""
    except ValueError as error:
        return None, f"grammars can't be followed with this tokenizer: {error}"[:MAX_MESSAGE]


def _virtual_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def read_message(file: BinaryIO) -> dict[str, str] | None:
    """None at the end."""
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
