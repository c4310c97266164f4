"""What a session of each kind looks like: its opening, its turns, its pauses.

No trace is published with the text, so what is known of lengths is a mean or a quantile of some
service. Where a docstring names a source, the number is from there; all others are assumptions.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Of a piece of text, in tokens: log-normal with this mean before it is cut at ``most``, as
    lengths of prompts and answers are in all published traces. ``sigma`` is that of the
    logarithm."""

    mean: float
    sigma: float
    most: int

    def draw(self, generator: np.random.Generator) -> int:
        """At least 1."""
        location = np.log(self.mean) - self.sigma**2 / 2
        return int(np.clip(round(generator.lognormal(location, self.sigma)), 1, self.most))


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """What sessions begin with: ``common_tokens`` that all share, then one of ``count`` texts,
    the k-th most popular in proportion to k ** -``zipf``."""

    count: int
    lengths: LengthDistribution
    zipf: float
    common_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SessionWorkload:
    """A session's first turn is its head and ``opening``; each further one repeats all that was
    said, the answers too, and adds ``message``. The number of turns is geometric, the pause
    between an answer's end and the next turn exponential."""

    heads: SharedPrefixes
    opening: LengthDistribution
    message: LengthDistribution
    answer: LengthDistribution
    mean_turns: float = 1.0
    mean_pause_seconds: float = 0.0


CHAT = SessionWorkload(
    heads=SharedPrefixes(
        count=16, lengths=LengthDistribution(600, 0.5, 4096), zipf=1.0, common_tokens=192
    ),
    opening=LengthDistribution(161, 1.0, 8192),
    message=LengthDistribution(161, 1.0, 8192),
    answer=LengthDistribution(338, 0.8, 4096),
    mean_turns=4.0,
    mean_pause_seconds=30.0,
)
"""Conversations of people. Mean lengths of messages and answers: ShareGPT, as the vLLM paper
measured it (Kwon et al., SOSP '23, section 6.1: 161 and 338 tokens). A system prompt per product on
top of one that all have; turns and pauses to think: assumptions."""

RAG = SessionWorkload(
    heads=SharedPrefixes(
        count=2000, lengths=LengthDistribution(3000, 0.5, 16_384), zipf=1.0, common_tokens=256
    ),
    opening=LengthDistribution(48, 0.6, 512),
    message=LengthDistribution(48, 0.6, 512),
    answer=LengthDistribution(160, 0.7, 2048),
)
"""A question behind a document. Popularity: 3 % of the documents get some 60 % of the requests
(RAGCache, Jin et al. 2024, section 3), which is what Zipf's law gives with exponent 1 for 2,000
documents. Lengths: assumptions."""

AGENTS = SessionWorkload(
    heads=SharedPrefixes(
        count=8, lengths=LengthDistribution(3800, 0.4, 16_384), zipf=0.8, common_tokens=192
    ),
    opening=LengthDistribution(400, 0.8, 4096),
    message=LengthDistribution(300, 1.2, 8192),
    answer=LengthDistribution(182, 0.8, 2048),
    mean_turns=10.0,
    mean_pause_seconds=2.0,
)
"""Calls of tools, one after the other, over a context that grows. The mean answer is that of
Mooncake's trace of tools and agents (Qin et al., FAST '25: 182 tokens); head, results of tools
and turns are assumptions that make the mean prompt about that trace's 8,596 tokens."""

REASONING = SessionWorkload(
    heads=SharedPrefixes(count=1, lengths=LengthDistribution(64, 0.0, 64), zipf=0.0),
    opening=LengthDistribution(180, 0.7, 2048),
    message=LengthDistribution(180, 0.7, 2048),
    answer=LengthDistribution(12_000, 0.8, 32_768),
)
"""Problems that are thought about at length. DeepSeek-R1 needed 12,000 tokens for a question of
AIME in the mean (model card of DeepSeek-R1-0528), and was let write 32,768 (DeepSeek-R1's model
card); the cut brings the mean down to about 11,000. Lengths of questions: assumptions."""

FEW_SHOT = SessionWorkload(
    heads=SharedPrefixes(count=12, lengths=LengthDistribution(3000, 0.4, 8192), zipf=0.5),
    opening=LengthDistribution(80, 0.5, 512),
    message=LengthDistribution(80, 0.5, 512),
    answer=LengthDistribution(12, 0.8, 128),
)
"""Extraction and classification: a dozen long lists of examples, each before many short cases.
All of it is assumed."""

WORKLOADS = {
    "chat": CHAT,
    "rag": RAG,
    "agents": AGENTS,
    "reasoning": REASONING,
    "few_shot": FEW_SHOT,
}
