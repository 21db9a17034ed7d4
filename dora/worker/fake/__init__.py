"""An engine without a model, for tests: tokens follow from the prompt, KV from the tokens."""
