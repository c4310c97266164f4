"""The library that all programs stand on. It imports none of them."""
