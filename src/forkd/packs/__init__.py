"""Packs: a snapshot's whole chain as one file that can be signed, sent and not trusted.

`protocol/packs/FORMAT.md` is the contract.  Nothing here knows the daemon or its store: a
client signs and fetches packs with the same code with which the host writes and reads them.
"""
