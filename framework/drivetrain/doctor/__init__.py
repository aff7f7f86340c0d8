"""``drivetrain doctor``: what is here, whether training works, and what to mend. Works where torch is not installed."""
