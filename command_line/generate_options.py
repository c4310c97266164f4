"""The options of ``baton generate``."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.errors import Invalid
from command_line.common_options import AsJson, ComputeOptions, ModelPath, SettingSources
from command_line.option_groups import with_option_groups

if TYPE_CHECKING:
    from baton.core.request import SamplingParams


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt. Repeatable: all prompts form one batch.")
    ] = None
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file whose whole text is one prompt.")
    ] = None

    def read(self) -> list[str]:
        """Return all prompts. Raises Invalid if there are none, or the file can't be read."""
        prompts = [*(self.prompt or []), *([_read(self.prompt_file)] if self.prompt_file else [])]
        if not prompts:
            raise Invalid("generate needs --prompt TEXT or --prompt-file FILE")
        return prompts


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens to generate per prompt.")
    ] = 64
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0
    top_p: Annotated[float, typer.Option(min=1e-9, max=1.0)] = 1.0
    top_k: Annotated[int, typer.Option(min=0, help="0 keeps all tokens.")] = 0
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.0
    repetition_penalty: Annotated[float, typer.Option(min=1e-9)] = 1.0
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1)] = 0
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos")] = False
    json_schema: Annotated[
        str | None, typer.Option(help="JSON schema that the answer must follow: a file, or JSON.")
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the whole answer must match.")
    ] = None

    def params(self) -> "SamplingParams":
        """Return the sampling parameters. Raises Invalid."""
        from baton.core.request import SamplingParams
        from command_line.generate_grammar import parse_grammar

        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            grammar=parse_grammar(self.json_schema, self.regex),
        )


@with_option_groups
def generate(
    prompts: PromptOptions,
    model: ModelPath = None,
    sampling: SamplingOptions = SamplingOptions(),
    compute: ComputeOptions = ComputeOptions(),
    as_json: AsJson = False,
    sources: SettingSources = SettingSources(),
) -> None:
    """Generate with the engine alone, in this process, without a cluster."""
    from baton.config import set_thread_environment

    settings = sources.load({"model": model, **compute.settings})
    texts, params = prompts.read(), sampling.params()
    set_thread_environment(settings.threads)  # before torch is imported
    from command_line.generate import run_generate

    run_generate(settings, texts, params, as_json)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"--prompt-file {path}: {error}") from error
