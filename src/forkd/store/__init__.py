"""What outlives the daemon: snapshots in folders, sandboxes in a database.

A snapshot is its folder: `manifest.json` and the files that it names.  There is no
second record of it elsewhere that could disagree.
"""
