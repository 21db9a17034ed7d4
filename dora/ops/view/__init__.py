"""Output for people: tables, the live view and its narration, for the command line and the demo.

Input is a simulator's report, a service's reply or a replay's decision. Opens no connection and no file.
"""
