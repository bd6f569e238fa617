"""What images and packs share of registries: names, credentials, and the client."""
