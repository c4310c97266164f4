"""Compare the store's eviction policies with plain LRU and the optimal policy, on a trace.

    python -m benchmarks.eviction [--trace FILE] [--json]

Measures the share of prompt tokens whose prefill is saved. The trace has a request per line. Its
``hash_ids`` identify blocks of 512 tokens; the last block is partial if ``input_length`` is not a
multiple of 512. Baton stores full blocks only, since a partial block has no key; plain LRU, the
reference, stores all blocks. A block counts as a hit only if all blocks before it in its request
are stored, too. Prints a table, and JSON as the last line; with ``--json``, only the JSON line.
"""

import argparse
import heapq
import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.core.ids import BlockKey
from kvstore.eviction import EVICTION_POLICIES, EvictionPolicy, new_eviction_policy
from testkit.machine import describe

BLOCK_TOKENS = 512
CAPACITIES = (1_000, 10_000, 30_000, 50_000, None)
"""Capacities in blocks; None is unlimited."""

TRACE = Path(__file__).parents[2] / "shared" / "traces" / "conversation_trace.jsonl"


@dataclass(frozen=True, slots=True)
class TracePrompt:
    """A prompt, given by the ``keys`` of its blocks. The first ``num_full`` blocks are full."""

    keys: tuple[BlockKey, ...]
    num_tokens: int

    @property
    def num_full(self) -> int:
        return self.num_tokens // BLOCK_TOKENS

    def tokens_of(self, num_blocks: int) -> int:
        """Return the number of tokens in the prompt's first ``num_blocks`` blocks."""
        return min(num_blocks * BLOCK_TOKENS, self.num_tokens)


@dataclass(slots=True)
class CacheHits:
    """The numbers of cache hits in a replay."""

    blocks: int = 0
    tokens: int = 0

    def note(self, prompt: TracePrompt, num_hits: int) -> None:
        self.blocks += num_hits
        self.tokens += prompt.tokens_of(num_hits)


def read_trace(path: Path) -> list[TracePrompt]:
    prompts = []
    with path.open() as lines:
        for line in lines:
            entry = json.loads(line)
            keys = tuple(BlockKey(number.to_bytes(16, "little")) for number in entry["hash_ids"])
            prompts.append(TracePrompt(keys, entry["input_length"]))
    return prompts


def replay(
    prompts: Sequence[TracePrompt], policy: EvictionPolicy, capacity: int | None
) -> CacheHits:
    """Replay with one of the store's policies. As in the store, a request's blocks are pinned while
    other blocks are evicted to make room for its missing ones."""
    saved, stored = CacheHits(), set[BlockKey]()
    for prompt in prompts:
        policy.tick()
        keys = prompt.keys[: prompt.num_full]
        num_hits = next((i for i, key in enumerate(keys) if key not in stored), len(keys))
        saved.note(prompt, num_hits)
        held = []
        for key in keys:
            if key in stored:
                policy.record_use(key)
                policy.mark_in_use(key)
            elif capacity is None or len(stored) < capacity or _evict(policy, stored):
                policy.admit(key)
                stored.add(key)
            else:
                break
            held.append(key)
        for key in reversed(held):
            policy.mark_evictable(key)
    return saved


def _evict(policy: EvictionPolicy, stored: set[BlockKey]) -> bool:
    victim = policy.next_victim()
    if victim is None:
        return False
    policy.remove(victim)
    stored.remove(victim)
    return True


def plain_lru(prompts: Sequence[TracePrompt], capacity: int | None) -> CacheHits:
    """Replay with LRU, independently of the store's code. All blocks are stored, even partial ones.
    A prompt's blocks are touched from the last to the first, so its last block is evicted first."""
    saved, stored = CacheHits(), OrderedDict[BlockKey, None]()
    for prompt in prompts:
        keys = prompt.keys
        num_hits = next((i for i, key in enumerate(keys) if key not in stored), len(keys))
        saved.note(prompt, num_hits)
        for key in reversed(keys):
            stored[key] = None
            stored.move_to_end(key)
        while capacity is not None and len(stored) > capacity:
            stored.popitem(last=False)
    return saved


def optimum(prompts: Sequence[TracePrompt], capacity: int | None) -> CacheHits:
    """Replay with Belady's optimal policy: evict the block whose next use is farthest in the
    future; don't store blocks that are never used again."""
    uses: dict[BlockKey, list[int]] = {}
    for index, prompt in enumerate(prompts):
        for key in prompt.keys:
            uses.setdefault(key, []).append(index)
    for times in uses.values():
        times.reverse()
    saved, stored = CacheHits(), dict[BlockKey, int]()
    farthest: list[tuple[int, int, BlockKey]] = []
    for prompt in prompts:
        keys = prompt.keys
        num_hits = next((i for i, key in enumerate(keys) if key not in stored), len(keys))
        saved.note(prompt, num_hits)
        for depth, key in enumerate(keys):
            uses[key].pop()
            stored.pop(key, None)
            if uses[key]:
                stored[key] = uses[key][-1]
                heapq.heappush(farthest, (-uses[key][-1], -depth, key))
        while capacity is not None and len(stored) > capacity:
            next_use, _, key = heapq.heappop(farthest)
            if stored.get(key) == -next_use:
                del stored[key]
    return saved


Rows = dict[str, dict[str, float]]
"""The share of all tokens (or of all blocks, if the row's name says so) that hit the cache, by row
and capacity."""


def measure(prompts: Sequence[TracePrompt]) -> Rows:
    """Replay the prompts with plain LRU, every eviction policy and the optimum, at every capacity.
    Return the shares of tokens and blocks that hit the cache. Progress goes to stderr."""
    num_tokens = sum(prompt.num_tokens for prompt in prompts)
    num_blocks = sum(len(prompt.keys) for prompt in prompts)
    rows: Rows = {}

    def note(row: str, share: float) -> None:
        rows.setdefault(row, {})[column] = share

    for capacity in CAPACITIES:
        column = "unbounded" if capacity is None else str(capacity)
        print(f"capacity in blocks: {column} …", file=sys.stderr, flush=True)
        lru = plain_lru(prompts, capacity)
        note("plain LRU, blocks hit", lru.blocks / num_blocks)
        note("plain LRU", lru.tokens / num_tokens)
        for name in EVICTION_POLICIES:
            note(
                f"store: {name}",
                replay(prompts, new_eviction_policy(name), capacity).tokens / num_tokens,
            )
        note("optimum (Belady)", optimum(prompts, capacity).tokens / num_tokens)
    return rows


def table(rows: Rows) -> str:
    columns = next(iter(rows.values()))
    lines = [f"{'capacity in blocks':24}" + "".join(f"{column:>10}" for column in columns)]
    for name, row in rows.items():
        lines.append(f"{name:24}" + "".join(f"{share:10.4f}" for share in row.values()))
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    options = parser.parse_args(arguments)
    prompts = read_trace(options.trace)
    num_tokens = sum(prompt.num_tokens for prompt in prompts)
    machine = describe()
    rows = measure(prompts)
    if not options.json:
        print(machine)
        print(
            f"{len(prompts):,} requests, {num_tokens:,} tokens; share of tokens of prefill saved:"
        )
        print(table(rows))
    print(json.dumps({"machine": machine, "rows": rows, "tokens": num_tokens}))


if __name__ == "__main__":
    main(sys.argv[1:])
