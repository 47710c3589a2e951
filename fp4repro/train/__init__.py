"""One training run: schedule, loop, evaluation, checkpoint, and the files that it leaves."""
