"""Does pinning a rollout to one version pay? Regimes of old rollouts on agent tasks, and the same rules in a fleet.

cell.py (regimes, tasks) ─▶ rollout.py (virtual time, policy.py) ─┐
                  └───────▶ fleet.py (the package's simulator) ───┴─▶ report.py ─▶ docs/pinning.md
"""
