"""Environments that DORA drives: ``dora serve --environment module:Class``, and ``dora environment`` by hand.

| module | contents |
|---|---|
| ``protocol`` | what a user's class is called with, and what it may return |
| ``loading``, ``spec`` | finds the environment that is named |
| ``gymnasium_text`` | environments of gymnasium with texts |
| ``openenv``, ``openenv_actions`` | environments behind a server of OpenEnv |
| ``verifiers``, ``verifiers_process``, ``verifiers_bridge`` | tasksets of verifiers, by another interpreter |
| ``episode`` | one session and its environment |
| ``calls`` | calls of a class, bounded in time |
| ``pool`` | environments that are prepared ahead |
| ``verdicts`` | the ends of equal conversations |
| ``attending`` | the sessions of one process |
| ``guard`` | the limits of a process |
| ``processes``, ``user_process`` | the processes in which a user's classes run |
| ``run``, ``child`` | the driver of sessions, and the one of ``dora serve`` |
"""

from dora.agents.environment.protocol import End, Environment, Messages, Reply, Task

__all__ = ["End", "Environment", "Messages", "Reply", "Task"]
