"""Kill and freeze real, unmodified ``vllm serve`` processes behind Baton's attached workers.

    python -m tests.vllm.chaos exact [--pairs 2] [--prompts 200] [--dtypes float32 bfloat16]
    python -m tests.vllm.chaos hazards [--only NAME …]
    python -m tests.vllm.chaos storm [--minutes 10] [--pairs 1] [--mixed 1] [--streams 20]
        [--every 15]

``exact`` compares hand-overs of prompts of 5 to 1,500 tokens with one server that hands nothing
over, greedily and sampled with a seed. ``hazards`` runs one fault at a time under hand-overs.
``storm`` streams in a loop while something is killed or frozen every few seconds; one server is
always left. No client may get a wrong token or an incomplete answer, and a minute later no server
may hold a request or its KV. In BF16, where answers may differ by rounding, they are only counted.

Prints progress, and JSON as the last line. Exits with 1 after a violation. The logs of all servers
and workers are in ``--logs``.
"""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from testkit.machine import describe
from testkit.model_zoo import make_model
from tests.vllm.chaos import exact, hazards, storm

PARTS = {"exact": exact.run, "hazards": hazards.run, "storm": storm.run}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="+", choices=[*PARTS])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--version", default="0.32.0", help="of vLLM, from .venv-stock")
    parser.add_argument("--logs", type=Path, help="a new folder; default: a temporary one")
    parser.add_argument("--pairs", type=int, default=1, help="prefill and decode servers of each")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+", choices=[*hazards.HAZARDS, hazards.OTHER_BLOCKS])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--mixed", type=int, default=1, help="servers that exchange no KV")
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between faults")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers are killed then, too
    print(describe(), f"seed {options.seed}", flush=True)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="baton-chaos-"))
    folder.mkdir(exist_ok=True)
    print(f"logs: {folder}", flush=True)
    model = make_model(folder / "llama", "llama", seed=1, head_dim=32)
    found = {"seed": options.seed, "vllm": options.version, **describe()}
    for part in options.parts:
        (folder / part).mkdir()
        found[part] = PARTS[part](options, model, folder / part)
    is_ok = all(found[part]["ok"] for part in options.parts)
    print(json.dumps({"ok": is_ok, **found}))
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
