"""Environments that DORA drives: ``dora serve --environment module:Class``, and ``dora environment`` by hand.

| module | contents |
|---|---|
| ``protocol`` | what a user's class is called with, and what it may return |
| ``loading`` | finds the class |
| ``episode`` | one session and its environment |
| ``calls`` | calls of a class, bounded in time |
| ``pool`` | environments that are prepared ahead |
| ``verdicts`` | the ends of equal conversations |
| ``attending`` | the sessions of one process |
| ``guard`` | the limits of a process |
| ``run``, ``child`` | a process, and the one of ``dora serve`` |
"""

from dora.environment.protocol import End, Environment, Messages, Reply, Task

__all__ = ["End", "Environment", "Messages", "Reply", "Task"]
