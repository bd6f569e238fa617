"""Running sandboxes as a whole: branched, reset, promoted, compared."""
