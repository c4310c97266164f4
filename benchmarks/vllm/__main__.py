"""Compare Baton, with its own engine or in front of vLLM servers, to vLLM's own disaggregation and
to vLLM alone.

    python -m benchmarks.vllm [--python .venv-vllm/bin/python] [--rounds 2]
        [--systems baton-attached,vllm-disaggregated,vllm,baton]
        [--loads 512x1,512x8,4096x1 | --loads none] [--shape 50m|0.5b]
        [--answer-tokens 32] [--compiled] [--kill]

All systems run on this machine, one after the other in each round. A load is TOKENSxCONCURRENCY;
each request has a prompt of its own. With the loads ``none``, only the CPU use of the idle systems
is measured. Disaggregated systems have a prefill and a decode worker with one thread each;
``baton-attached`` is Baton in front of the two servers of ``vllm-disaggregated``. vLLM alone has a
thread per core, and so have each worker of ``baton-all-cores`` and the one mixed worker of
``baton-mixed``; ``baton-2-mixed`` has two mixed workers with one thread each. In all systems, vLLM
runs with ``--enforce-eager``, since torch.compile would take minutes at each start; ``--compiled``
lets vLLM alone compile. Prints medians over all requests of all rounds, the CPU use of each program
of the idle system, the CPU time per token of what stands in front of attached servers, and JSON as
the last line. With
``--kill``, a worker that generates answers is killed in the last round while 20 answers are
generated, and the number of these answers that were completed is printed, too.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import httpx
import numpy as np

from benchmarks.vllm.loads import (
    Answer,
    Load,
    idle_cpu_percent,
    make_row,
    own_cpu_seconds,
    run_load,
)
from benchmarks.vllm.model import SHAPES, VOCAB_SIZE, make_model
from benchmarks.vllm.systems import (
    System,
    baton,
    baton_attached,
    vllm_alone,
    vllm_disaggregated,
)
from testkit.machine import describe

SEED = 1
KILL_STREAMS = 20
KILL_PROMPT_TOKENS = 64
KILL_ANSWER_TOKENS = 100
EVENTS_BEFORE_KILL = 20


async def count_survivors(system: System, rng: np.random.Generator) -> int:
    """Kill the decode worker while ``KILL_STREAMS`` answers are generated. Return how many of the
    answers are completed."""
    begun = asyncio.Event()

    async def is_complete() -> bool:
        prompt = [int(token) for token in rng.integers(10, VOCAB_SIZE, KILL_PROMPT_TOKENS)]
        count = 0
        try:
            async for events in system.stream(prompt, KILL_ANSWER_TOKENS):
                count += events
                if count >= EVENTS_BEFORE_KILL:
                    begun.set()
        except (httpx.HTTPError, RuntimeError):
            return False
        finally:
            begun.set()
        return True

    async with asyncio.TaskGroup() as tasks:
        answers = [tasks.create_task(is_complete()) for _ in range(KILL_STREAMS)]
        await begun.wait()
        system.kill_decode()
    return sum(answer.result() for answer in answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--systems", default="baton-attached,vllm-disaggregated,vllm,baton")
    parser.add_argument("--loads", default="512x1,512x8,4096x1")
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    python = options.python.absolute()
    makers: dict[str, Callable[[Path], AbstractContextManager[System]]] = {
        "vllm-disaggregated": lambda model: vllm_disaggregated(model, python),
        "baton-attached": lambda model: baton_attached(model, python),
        "vllm": lambda model: vllm_alone(model, python, compiled=options.compiled),
        "baton": lambda model: baton(model),
        "baton-all-cores": lambda model: baton(model, threads=0),
        "baton-mixed": lambda model: baton(model, threads=0, mixed=1),
        "baton-2-mixed": lambda model: baton(model, mixed=2),
    }
    names = [] if options.loads == "none" else options.loads.split(",")
    loads = [Load(*map(int, text.split("x"))) for text in names]
    machine = describe()
    print(machine)
    answers: dict[tuple[str, str], list[Answer]] = defaultdict(list)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    idle: dict[str, list[dict[str, float]]] = defaultdict(list)
    survivors: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        print(f"{make_model(model, SEED, options.shape) / 1e6:.0f} million parameters, BF16")
        for round_number in range(options.rounds):
            for name in options.systems.split(","):
                rng = np.random.default_rng(round_number)
                with makers[name](model) as system:
                    asyncio.run(
                        run_load(system, Load(256, 2), rng, options.answer_tokens)
                    )  # warm-up
                    idle[name].append(idle_cpu_percent(system))
                    for load in loads:
                        before = own_cpu_seconds(system)
                        got, duration = asyncio.run(
                            run_load(system, load, rng, options.answer_tokens)
                        )
                        spent = 1e3 * (own_cpu_seconds(system) - before)
                        count = load.num_requests * options.answer_tokens
                        if name == "baton-attached":
                            print(f"{name} {load}: {spent / count:.3f} ms of Baton's CPU per token")
                        answers[name, str(load)] += got
                        seconds[name, str(load)] += duration
                        print(f"round {round_number}: {make_row(name, str(load), got, duration)}")
                    if options.kill and round_number == options.rounds - 1:
                        survivors[name] = asyncio.run(count_survivors(system, rng))
    rows = [make_row(*key, answers[key], seconds[key]) for key in answers]
    for row in rows:
        print(row)
    for name, rounds in idle.items():
        total = statistics.median(sum(percents.values()) for percents in rounds)
        each = ", ".join(
            f"{part} {statistics.median(percents[part] for percents in rounds):.1f}"
            for part in rounds[0]
        )
        print(f"{name:20} idle: {total:.1f} % of a core ({each})")
    for name, count in survivors.items():
        print(f"{name:20} decode worker killed: {count} of {KILL_STREAMS} answers complete")
    result = {
        "machine": machine,
        "rows": [asdict(row) for row in rows],
        "idle_percent": dict(idle),
        "survivors": survivors,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
