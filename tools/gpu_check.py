"""Everything CUDA: built, checked against the CPU's result, and timed.

    python -m tools.gpu_check [--rounds 20] [--quick]

Needs a GPU, and of packages torch, triton, transformers and what they bring. Prints one table
and JSON as the last line; exits with 1 when a result is wrong, 2 when there is no GPU.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from baton.core.ids import BlockId, RequestId, TokenId
from baton.engine.attention.base import Attention, make_batch
from baton.engine.attention.reference import ReferenceAttention
from baton.engine.kv_pool import KvPool
from baton.engine.plan import Plan, Row
from baton.engine.runner import ModelRunner, make_attention
from tests.unit.attention_cases import (
    CASES,
    TOLERANCE,
    poison,
    random_pool,
    rows_of,
    same_bytes,
)
from tools.gpu_speed import (
    GREEDY,
    SHAPES,
    DevicePool,
    Line,
    attention_is_fast,
    device,
    kv_write_is_fast,
    model_is_fast,
)

DEMO = Path(__file__).parents[1] / "baton" / "models" / "demo"
PROMPT = "def read(path):\n"


def kernels_are_right() -> Iterator[Line]:
    """Every case of the unit tests, with the reference on the CPU: the answer, and every byte
    of the pool after it. What no row may read is NaN."""
    for seed, case in enumerate(CASES):
        chance = torch.Generator().manual_seed(seed)
        pool, rows = random_pool(case, chance), rows_of(case, seed)
        poison(pool, rows)
        shapes = [(case.heads, case.dim), *[(case.kv_heads, case.dim)] * 2]
        total = sum(row.num_tokens for row in rows)
        qkv = [torch.randn(total, *s, generator=chance).to(case.dtype) for s in shapes]
        wanted, wanted_pool = answer(ReferenceAttention, torch.device("cpu"), pool, rows, qkv)
        got, got_pool = answer(make_attention, device(), pool, rows, qkv)
        worst = float((got - wanted).abs().max())
        written = "" if same_bytes(got_pool, wanted_pool) else ", KV written wrongly"
        ok = worst <= TOLERANCE[case.dtype] and not written  # false for NaN
        result = f"within {worst:.1e} of the reference{written}"
        yield Line(f"KV write and attention: {case.name}", result, ok=ok)


def answer(
    backend: Callable[[KvPool], Attention],
    place: torch.device,
    pool: torch.Tensor,
    rows: Sequence[Row],
    qkv: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one layer, and the pool after it, both on the CPU."""
    held = DevicePool(pool.clone().to(place))
    attention = backend(held)  # type: ignore[arg-type]
    attention.prepare(make_batch(rows, held.block_tokens, place))
    attended = attention.attend(1, *(part.to(place) for part in qkv))
    return attended.cpu().float(), held.tensor.cpu()


def demo_tokens_are_equal() -> Iterator[Line]:
    """The engine on the GPU, in FP32, against transformers on the CPU."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    reference = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    ids = tokenizer(PROMPT)["input_ids"]
    wanted = reference.generate(
        torch.tensor([ids]), max_new_tokens=GREEDY.max_tokens, do_sample=False, eos_token_id=None
    )[0, len(ids) :].tolist()
    runner = ModelRunner.load(DEMO, device="cuda", dtype="float32", num_blocks=64)
    blocks = tuple(BlockId(n) for n in range(64))
    tokens, start = tuple(TokenId(token) for token in ids), 0
    got: list[int] = []
    while len(got) < GREEDY.max_tokens:
        row = Row(RequestId("demo"), tokens, start, blocks, True, GREEDY)
        sampled = runner.run(Plan(0, (row,))).sampled[0]
        assert sampled is not None
        start += len(tokens)
        tokens = (sampled.token_id,)
        got.append(int(sampled.token_id))
    equal = sum(ours == theirs for ours, theirs in zip(got, wanted, strict=True))
    yield Line(
        "demo model in FP32, greedy", f"{equal} of {len(wanted)} tokens are transformers' own",
        ok=got == wanted,
    )  # fmt: skip


def not_there_yet() -> Iterator[Line]:
    for what in ("CUDA graphs for decode", "GPU-to-GPU-process hand-off over CUDA IPC"):
        yield Line(what, "not implemented")


def guarded(name: str, part: Iterable[Line]) -> Iterator[Line]:
    """What goes wrong in one part is a row too, so that the others' results are not lost."""
    try:
        yield from part
    except Exception as error:
        reason = str(error).partition("\n")[0]
        yield Line(name, f"{type(error).__name__}: {reason}", ok=False)


def show(line: Line) -> None:
    milliseconds = f"{line.seconds * 1e3:10.3f} ms" if line.seconds is not None else " " * 13
    ratio = f"{line.ratio:6.2f} of {line.against}" if line.ratio is not None else ""
    mark = "" if line.ok else "   WRONG"
    print(f"{line.what:58} {milliseconds}  {line.result:44} {ratio}{mark}", flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="no models of real shapes")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU here", file=sys.stderr)
        return 2
    about = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "rounds": options.rounds,
    }
    print(about)
    rounds: int = options.rounds
    parts = {
        "kernels": kernels_are_right(),
        "demo model": demo_tokens_are_equal(),
        "speed of KV write": kv_write_is_fast(rounds),
        "speed of attention": attention_is_fast(rounds),
    }
    if not options.quick:
        parts |= {name: model_is_fast(name, rounds) for name in SHAPES}
    parts["not there yet"] = not_there_yet()
    lines = []
    for name, part in parts.items():
        for line in guarded(name, part):
            show(line)
            lines.append(line)
    ok = all(line.ok for line in lines)
    print(json.dumps({**about, "ok": ok, "lines": [asdict(line) for line in lines]}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
