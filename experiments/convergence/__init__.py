"""Learning curves of a tiny model on a verifiable task, by mode: what the window costs and what it saves.

rows.py ─▶ plan.py ─▶ trial.py (a demo, one JSON file a run) ─┐
   └─────▶ fleet.py (the simulator's step times) ─────────────┴─▶ report.py ─▶ plots.py, page.py
"""
