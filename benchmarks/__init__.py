"""Measure what forkd costs; README.md has the method."""
