"""``dora simulate``: one run or all policies (run), fault sweeps (sweep), the presets (presets)."""
