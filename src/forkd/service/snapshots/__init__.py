"""Snapshots: which there are (`catalog`), baking, writing and compacting them, and upkeep."""
