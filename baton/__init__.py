"""The library that all of Baton's programs share. It imports none of the programs."""
