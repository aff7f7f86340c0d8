"""What each strategy says of itself before launch. No torch here: `--help` and the check before launch read it."""
