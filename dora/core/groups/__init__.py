"""The window, waiting requests, evaluations and freshness: data of prompt groups."""
