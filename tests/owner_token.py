"""Owners' tokens for tests: strong enough for a service, and the same for the same word."""

import hashlib


def owner_token(word: str) -> str:
    return hashlib.sha256(word.encode()).hexdigest()
