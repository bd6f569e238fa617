"""What forkd does, to be seen: figures, traces, and the audit log.

Everything is handed to whoever measures; nothing here knows what it measures.
"""
