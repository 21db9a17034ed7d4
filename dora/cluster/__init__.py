"""DORA on machines that a scheduler gives out: a service, and hosts that come and go, each a job of its own.

    run.toml ──▶ run_file ──▶ slurm.py, kubernetes.py ──▶ the scheduler's jobs ──▶ `dora serve`, `dora host`

The service does not know of it: hosts join and leave as those that are started by hand. Entry points ``dora.clusters``
add further schedulers.
"""
