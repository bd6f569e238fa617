"""Limits of sandboxes: what to write (`limits`, pure) and writing it (`tree`)."""
