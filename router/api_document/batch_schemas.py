"""OpenAPI schemas of files and batches."""

from typing import Any

from router.api_document.schema_forms import NULL, TEXT, Schema

INTEGER: Schema = {"type": "integer"}
MAYBE_INTEGER: Schema = {"anyOf": [INTEGER, NULL]}
MAYBE_TEXT: Schema = {"anyOf": [TEXT, NULL]}


def open_object(**required: Schema) -> Schema:
    return {"type": "object", "properties": required, "required": list(required)}


def list_of(item: Schema) -> Schema:
    return open_object(
        object={"const": "list"},
        data={"type": "array", "items": item},
        has_more={"type": "boolean"},
        first_id=MAYBE_TEXT,
        last_id=MAYBE_TEXT,
    )


FILE = open_object(
    id=TEXT,
    object={"const": "file"},
    bytes=INTEGER,
    created_at=INTEGER,
    expires_at=MAYBE_INTEGER,
    filename=TEXT,
    purpose=TEXT,
    status=TEXT,
)
COUNTS = open_object(total=INTEGER, completed=INTEGER, failed=INTEGER)
BATCH = open_object(
    id=TEXT,
    object={"const": "batch"},
    endpoint=TEXT,
    input_file_id=TEXT,
    output_file_id=MAYBE_TEXT,
    error_file_id=MAYBE_TEXT,
    completion_window=TEXT,
    status=TEXT,
    created_at=INTEGER,
    expires_at=INTEGER,
    request_counts=COUNTS,
)

BATCH_RESPONSE_SCHEMAS: dict[str, Schema] = {
    "File": FILE,
    "Files": list_of({"$ref": "#/components/schemas/File"}),
    "DeletedFile": open_object(id=TEXT, object={"const": "file"}, deleted={"const": True}),
    "Batch": BATCH,
    "Batches": list_of({"$ref": "#/components/schemas/Batch"}),
}

UPLOAD: Schema = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary", "minLength": 1},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
    "required": ["file", "purpose"],
    "additionalProperties": False,
}
UPLOAD_BODY: dict[str, Any] = {
    "required": True, "content": {"multipart/form-data": {"schema": UPLOAD}},
}  # fmt: skip


def page_parameters(max_limit: int, *others: str) -> list[dict[str, Any]]:
    """Return the query parameters of a route that lists items: ``limit`` (1 to ``max_limit``),
    ``after``, and a string parameter for each name in ``others``."""
    limit = {"type": "integer", "minimum": 1, "maximum": max_limit}
    schemas = {"limit": limit, "after": TEXT, **dict.fromkeys(others, TEXT)}
    return [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in schemas.items()
    ]
