"""Build what a machine boots: kernel, initramfs and root file system, from a recipe."""
