"""Answers prompts with vLLM alone, without Baton. The tests in this folder compare Baton's answers
with these.

    .venv-vllm/bin/python -m tests.vllm.e2e.vllm_alone ANSWERS DTYPE < jobs.json

``jobs.json`` has the prompts for each model directory; the answers are written to the file
``ANSWERS``. Prompts are answered greedily, one at a time.
"""

import json
import sys
from pathlib import Path

ANSWER_TOKENS = 24
POOL_BYTES = 64 * 2**20


def answers(model: str, prompts: list[list[int]], dtype: str) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    alone = LLM(
        model,
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        block_size=32,
        max_num_seqs=1,
        kv_cache_memory_bytes=POOL_BYTES,
    )
    greedy = SamplingParams(
        temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False
    )
    return [
        list(
            alone.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)[0]
            .outputs[0]
            .token_ids
        )
        for prompt in prompts
    ]


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    found = {model: answers(model, prompts, sys.argv[2]) for model, prompts in jobs.items()}
    Path(sys.argv[1]).write_text(json.dumps(found))
