"""Algorithms of collectives: functions from a number of ranks to a schedule, one idea a file. No torch here."""
