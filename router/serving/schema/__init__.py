"""Request fields that several APIs have in common, and their validation.

Validation is strict: a wrong type, a number that is not finite, or (except in messages) an unknown
field is an error. If the only errors are unknown fields that can't change the answer,
:func:`router.http.body_parser.parse_body` validates the body again without them. ``null`` means
that a field is absent."""
