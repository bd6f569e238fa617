"""Names for addresses, made of titles."""


def slug(title):
    """Return a title as a part of an address."""
    return "-".join(title.lower().split())
