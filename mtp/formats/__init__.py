"""Heads in the layouts of other software: writers, independent readers, and the way back. See `catalogue`."""
