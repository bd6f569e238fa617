"""fork(2) for virtual machines."""

__version__ = "0.1.0"
