"""Tests of drivetrain.checkpoint."""
