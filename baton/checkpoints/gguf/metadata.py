"""The metadata of a GGUF file, with errors that name the file and the key."""

from pathlib import Path
from typing import Any, TypeVar

from gguf import GGUFReader
from gguf.gguf_reader import ReaderTensor

from baton.errors import Invalid

T = TypeVar("T")


class GgufFile:
    """An opened GGUF file. Raises Invalid if it can't be read, or is one of several files of a
    model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = GGUFReader(path)
            self._values = {key: field.contents() for key, field in reader.fields.items()}
        # The package raises whatever a malformed file leads to.
        except Exception as error:
            raise Invalid(f"{path} is not a GGUF file, or is damaged: {error!r}") from error
        self.tensors: dict[str, ReaderTensor] = {each.name: each for each in reader.tensors}
        if (count := self.get("split.count", 0)) > 1:
            raise Invalid(
                f"{path} is one of {count} files of a model; join them first, "
                "with `llama-gguf-split --merge`"
            )
        self.architecture: str = self.require("general.architecture", str)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; ``default`` if the file does not have it."""
        return self._values.get(key, default)

    def require(self, key: str, kind: type[T]) -> T:
        """Return the value of a key. Raises Invalid if it is missing or not of this type."""
        value = self.get(key)
        if not isinstance(value, kind):
            problem = "is missing" if value is None else f"is {str(value)[:100]!r}"
            raise Invalid(f"{self.path}: the key {key} {problem}; it must be a {kind.__name__}")
        return value

    def own(self, key: str, default: Any = None) -> Any:
        """Return the value of an architecture's key, such as ``llama.block_count``."""
        return self.get(f"{self.architecture}.{key}", default)

    def require_own(self, key: str, kind: type[T]) -> T:
        return self.require(f"{self.architecture}.{key}", kind)
