"""The way of a prompt group through the service: prompts, responses, reports, delivery, streams."""
