"""The host side's vocabulary: frozen values without effects.

These are ours to rename; what clients see is `forkd.wire`, and only
`forkd.daemon.convert` knows both.
"""
