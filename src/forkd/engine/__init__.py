"""Drive VMM processes, and the agents in their guests, over Unix sockets.

    frames    bytes to frames and back, without I/O
    channel   a connection that carries frames
    control   asks a VMM process, or watches it end
    guest     asks the agent in a guest
    process   starts a VMM process
    configs   what a VMM process is told

Nothing here knows of tags, databases or cgroups' limits: `service` composes those.
"""
