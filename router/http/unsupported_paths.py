"""Names the parts of OpenAI's and Anthropic's APIs that this server does not have, so that a client
that requests one of them is told why it is missing. The status is 400, since after a 404 some
proxies send nothing to the server for a while, as if it had lost the model."""

from collections.abc import Mapping

TEXT_ONLY = "this server only generates text"

REASONS: Mapping[str, str] = {
    "/v1/assistants": "deprecated by OpenAI; use /v1/responses",
    "/v1/audio": TEXT_ONLY,
    "/v1/conversations": "use previous_response_id of /v1/responses",
    "/v1/fine_tuning": "models are not trained here",
    "/v1/images": TEXT_ONLY,
    "/v1/messages/batches": "use /v1/batches, with files in OpenAI's form",
    "/v1/moderations": "answers are not moderated",
    "/v1/realtime": f"{TEXT_ONLY}; use a stream of /v1/responses or /v1/chat/completions",
    "/v1/threads": "deprecated by OpenAI; use /v1/responses",
    "/v1/uploads": "upload a whole file with /v1/files",
    "/v1/vector_stores": "there is no search; offer one as a tool",
    "/v1/videos": TEXT_ONLY,
}


def unsupported_reason(path: str) -> str | None:
    """Return why a known API is not supported; None for any other path."""
    for prefix, reason in REASONS.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return reason
    return None
