"""The library that all of Baton's programs use. It imports none of them."""
