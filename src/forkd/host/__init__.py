"""The only callers of the kernel: processes, files, network links, KVM."""
