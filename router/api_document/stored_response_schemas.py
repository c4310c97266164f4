"""OpenAPI schemas of the routes for stored responses."""

from router.api_document.batch_schemas import list_of, open_object
from router.api_document.schema_forms import ANYTHING, TEXT, Schema

STORED_RESPONSE_SCHEMAS: dict[str, Schema] = {
    "DeletedResponse": open_object(id=TEXT, object={"const": "response"}, deleted={"const": True}),
    "InputItems": list_of(ANYTHING),
}
