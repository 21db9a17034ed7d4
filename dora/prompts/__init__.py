"""Prompt sources. Prompts are tokenized here, once; the rest of the service sees token ids."""
