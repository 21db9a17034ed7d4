"""``dora doctor``: checks this machine in stages before a run, each stage in a process of its own.

``stages.py`` lists the stages, ``checks.py`` and ``engine_checks.py`` run them, and ``run.py`` starts their processes
and collects their verdicts.
"""
