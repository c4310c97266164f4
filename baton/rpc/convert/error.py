"""Conversion of BatonErrors to messages, for protocols without gRPC's statuses."""

from baton.errors import BatonError, Overloaded, error_from_grpc_status, error_mapping
from baton.rpc.v1 import conductor_pb2 as pb

MAX_MESSAGE_CHARACTERS = 512

MAX_RETRY_SECONDS = 3600.0


def error_to_proto(error: BatonError) -> pb.Refusal:
    return pb.Refusal(
        status=error_mapping(error).grpc_status,
        message=(str(error) or type(error).__name__)[:MAX_MESSAGE_CHARACTERS],
        retry_after_seconds=error.retry_after_seconds if isinstance(error, Overloaded) else 0.0,
    )


def error_from_proto(message: pb.Refusal) -> BatonError:
    error = error_from_grpc_status(message.status, message.message)
    if isinstance(error, Overloaded):
        error.retry_after_seconds = parse_retry_after(message.retry_after_seconds)
    return error


def parse_retry_after(value: str | float) -> float:
    """Return the number of seconds that a peer sent, or 1 if the value is malformed or out of
    range."""
    try:
        seconds = float(value)
    except ValueError:
        return 1.0
    return seconds if 0 <= seconds <= MAX_RETRY_SECONDS else 1.0
