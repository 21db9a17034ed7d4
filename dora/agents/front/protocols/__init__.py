"""The protocols of others, one module each; ``parts.py`` has the parts of an answer that they share."""
