"""Mixtures of experts under everything at once: short of KV, re-balanced, killed; then every promise is checked."""
