"""What travels between the daemon and its clients: one module per version of the API."""
