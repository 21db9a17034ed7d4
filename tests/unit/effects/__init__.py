"""One row for each option of the command line and each setting: how its effect is seen."""
