"""The OpenAPI document of the router."""
