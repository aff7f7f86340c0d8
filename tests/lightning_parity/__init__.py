"""Projects as people publish them, run under Lightning and under drivetrain with nothing but the import changed."""
