"""The parameters of each kind of session: its first message, its turns, its pauses.

Published traces don't contain their texts, so all that is known about lengths is a mean or a
quantile for some service. Where a docstring names a source, the numbers are from that source; all
other numbers are assumptions.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """The distribution of a text's length in tokens: log-normal with mean ``mean`` before it is
    clipped at ``max_tokens``, like the lengths of prompts and answers in all published traces.
    ``sigma`` is the standard deviation of the logarithm."""

    mean: float
    sigma: float
    max_tokens: int

    def draw(self, generator: np.random.Generator) -> int:
        """Draw a length of at least 1."""
        location = np.log(self.mean) - self.sigma**2 / 2
        return int(np.clip(round(generator.lognormal(location, self.sigma)), 1, self.max_tokens))


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The prefixes that sessions share. A prefix consists of ``common_tokens`` tokens that all
    prefixes have in common, and one of ``count`` texts. The popularity of the k-th text is
    proportional to k ** -``zipf``."""

    count: int
    lengths: LengthDistribution
    zipf: float
    common_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SessionWorkload:
    """The parameters of a kind of session. The prompt of the first turn is a shared prefix
    (``prefixes``) and ``first_message``; each further prompt repeats the whole conversation,
    including the answers, and adds ``message``. The number of turns is geometric, the pause between
    an answer's end and the next turn exponential."""

    prefixes: SharedPrefixes
    first_message: LengthDistribution
    message: LengthDistribution
    answer: LengthDistribution
    mean_turns: float = 1.0
    mean_pause_seconds: float = 0.0


CHAT = SessionWorkload(
    prefixes=SharedPrefixes(
        count=16, lengths=LengthDistribution(600, 0.5, 4096), zipf=1.0, common_tokens=192
    ),
    first_message=LengthDistribution(161, 1.0, 8192),
    message=LengthDistribution(161, 1.0, 8192),
    answer=LengthDistribution(338, 0.8, 4096),
    mean_turns=4.0,
    mean_pause_seconds=30.0,
)
"""Chats with people. Mean lengths of messages and answers: ShareGPT, as measured in the vLLM paper
(Kwon et al., SOSP '23, section 6.1: 161 and 338 tokens). Assumptions: a system prompt per product
after a part that all share; the number of turns, and the pauses to think."""

RAG = SessionWorkload(
    prefixes=SharedPrefixes(
        count=2000, lengths=LengthDistribution(3000, 0.5, 16_384), zipf=1.0, common_tokens=256
    ),
    first_message=LengthDistribution(48, 0.6, 512),
    message=LengthDistribution(48, 0.6, 512),
    answer=LengthDistribution(160, 0.7, 2048),
)
"""A question after a document. Popularity: 3 % of the documents get some 60 % of the requests
(RAGCache, Jin et al. 2024, section 3), which is what Zipf's law gives with exponent 1 for 2,000
documents. Lengths: assumptions."""

AGENTS = SessionWorkload(
    prefixes=SharedPrefixes(
        count=8, lengths=LengthDistribution(3800, 0.4, 16_384), zipf=0.8, common_tokens=192
    ),
    first_message=LengthDistribution(400, 0.8, 4096),
    message=LengthDistribution(300, 1.2, 8192),
    answer=LengthDistribution(182, 0.8, 2048),
    mean_turns=10.0,
    mean_pause_seconds=2.0,
)
"""Successive tool calls over a growing context. The mean answer is that of Mooncake's trace of
tools and agents (Qin et al., FAST '25: 182 tokens). The lengths of prefixes and tool results and
the number of turns are assumptions, chosen so that the mean prompt has about 8,596 tokens, as in
that trace."""

REASONING = SessionWorkload(
    prefixes=SharedPrefixes(count=1, lengths=LengthDistribution(64, 0.0, 64), zipf=0.0),
    first_message=LengthDistribution(180, 0.7, 2048),
    message=LengthDistribution(180, 0.7, 2048),
    answer=LengthDistribution(12_000, 0.8, 32_768),
)
"""Problems with long reasoning. DeepSeek-R1 needed 12,000 tokens on average for a question of AIME
(model card of DeepSeek-R1-0528), with a limit of 32,768 (DeepSeek-R1's model card); clipping lowers
the mean to about 11,000. Lengths of questions: assumptions."""

FEW_SHOT = SessionWorkload(
    prefixes=SharedPrefixes(count=12, lengths=LengthDistribution(3000, 0.4, 8192), zipf=0.5),
    first_message=LengthDistribution(80, 0.5, 512),
    message=LengthDistribution(80, 0.5, 512),
    answer=LengthDistribution(12, 0.8, 128),
)
"""Extraction and classification: a dozen long lists of examples, each followed by many short cases.
All numbers are assumptions."""

WORKLOADS = {
    "chat": CHAT,
    "rag": RAG,
    "agents": AGENTS,
    "reasoning": REASONING,
    "few_shot": FEW_SHOT,
}
