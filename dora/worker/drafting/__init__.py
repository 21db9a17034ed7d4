"""Drafts tokens that an engine verifies: from the history of responses, as many as pay."""
