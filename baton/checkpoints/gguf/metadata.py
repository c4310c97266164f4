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
            self._reader = GGUFReader(path)
        # The package raises whatever a malformed file leads to.
        except Exception as error:
            raise Invalid(f"{path} is not a GGUF file, or is damaged: {error!r}") from error
        if self.get("split.count", 0) > 1:
            raise Invalid(
                f"{path} is one of {self.get('split.count', 0)} files of a model; join them first, "
                "with `llama-gguf-split --merge`"
            )
        self.architecture: str = self.require("general.architecture", str)

    @property
    def tensors(self) -> dict[str, ReaderTensor]:
        return {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; ``default`` if the file does not have it."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

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
