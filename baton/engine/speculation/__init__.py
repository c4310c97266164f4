"""Speculative decoding with unchanged answers: drafts, their verification, and when to draft."""
