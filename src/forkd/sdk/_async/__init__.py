"""The asynchronous SDK; `forkd.sdk` names what is public."""
