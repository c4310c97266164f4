"""OpenAPI schemas of stored responses."""

from router.api_document.batch_schemas import list_of, open_object
from router.api_document.request_schemas import NULL, TEXT, Schema

STATUSES = ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ERROR: Schema = open_object(code=TEXT, message=TEXT)
STORED_RESPONSE: Schema = {
    "type": "object",
    "properties": {
        "id": TEXT,
        "object": {"const": "response"},
        "status": {"enum": STATUSES},
        "background": {"anyOf": [{"type": "boolean"}, NULL]},
        "error": {"anyOf": [ERROR, NULL]},
        "output": {"type": "array", "items": {"type": "object"}},
    },
    "required": ["id", "object", "status", "output"],
}

STORED_RESPONSE_SCHEMAS: dict[str, Schema] = {
    "StoredResponse": STORED_RESPONSE,
    "DeletedResponse": open_object(id=TEXT, object={"const": "response"}, deleted={"const": True}),
    "InputItems": list_of({"type": "object"}),
}
