"""Sandboxes: who they are (`roster`), who owns one (`owner`), how they are forked (`forking`)."""
