"""A network link per sandbox that asks for one: which (`plan`, pure), and making it (`taps`).

There is no way out yet: nothing is forwarded, and no route leads beyond the
host's end of each link.
"""
