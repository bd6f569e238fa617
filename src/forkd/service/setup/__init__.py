"""Setting a host up, and taking that back (docs/adr/0065)."""
