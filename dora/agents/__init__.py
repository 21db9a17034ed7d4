"""For agents: chats over sessions, the HTTP front, and environments that DORA drives."""
