"""The sampling parameters that a model's folder recommends, for requests that leave them out."""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from baton.checkpoints.json_file import JsonFile
from baton.errors import Invalid
from router.serving.schema.sampling_fields import SamplingFields

FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The values that a request without them has."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the values in the generation_config.json of a model's folder; those that it lacks
        are those of :data:`OPENAI_DEFAULTS`. As in vLLM, ``do_sample`` has no effect. Unlike in
        vLLM, ``max_new_tokens`` has none either: it would cut answers off that clients asked for.
        Raises Invalid, naming the file and the key, for a value that no request may have."""
        path = folder / FILE
        if not path.exists():
            return cls()
        file = JsonFile(path)
        given = {name: value for name in NAMES if (value := file.get(name)) is not None}
        try:
            SamplingFields.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise Invalid(
                f"{path}: {first['loc'][0]}: {first['msg']}; with the setting "
                "generation_defaults=none, such values are not read"
            ) from error
        return cls(**given)

    def with_values_of(self, body: SamplingFields) -> Self:
        """Return these values, replaced by those that a request has."""
        given = {name: value for name in NAMES if (value := getattr(body, name)) is not None}
        return replace(self, **given) if given else self

    @property
    def json(self) -> dict[str, float]:
        return asdict(self)


NAMES = tuple(field.name for field in fields(SamplingDefaults))

OPENAI_DEFAULTS = SamplingDefaults()
"""Those of OpenAI's API, in which no model has its own."""
