"""TLS with a pinned certificate, to routers of the same cluster or machine."""

import ssl


def pinned_tls_context(certificate: str | None) -> ssl.SSLContext | None:
    """Return a TLS context that trusts exactly the certificate in the PEM file ``certificate``, for
    any host name. Return None if ``certificate`` is None."""
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certificate)
    return context
