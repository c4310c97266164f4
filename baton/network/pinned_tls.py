"""TLS between programs of one cluster, and to the router of this machine."""

import ssl


def pinned_tls_context(certificate: str | None) -> ssl.SSLContext | None:
    """Trusts the very certificate in this PEM file, by whatever name its holder is reached; None
    where there is no TLS."""
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certificate)
    return context
