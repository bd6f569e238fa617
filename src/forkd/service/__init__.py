"""Use cases: what the daemon does, without HTTP.

`api.Service` is the whole of what a front end may call; `host_service.HostService`
is it on a real host.
"""
