"""The protocols by which spans can be sent to a collector."""

from enum import StrEnum
from urllib.parse import urlsplit


class OtlpProtocol(StrEnum):
    """The values of OpenTelemetry's variable ``OTEL_EXPORTER_OTLP_PROTOCOL``."""

    GRPC = "grpc"
    HTTP = "http/protobuf"

    def url(self, endpoint: str) -> str:
        """Return the URL to which spans are sent. ``endpoint`` is a URL without a path. Without a
        port, the port of a plain-text URL is the collector's for this protocol."""
        parts = urlsplit(endpoint)
        authority = parts.netloc
        if parts.port is None and parts.scheme == "http":
            authority += ":4318" if self is OtlpProtocol.HTTP else ":4317"
        path = "/v1/traces" if self is OtlpProtocol.HTTP else ""
        return f"{parts.scheme}://{authority}{path}"
