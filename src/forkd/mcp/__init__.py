"""The MCP server: what a daemon can do, as tools for AI agents.

`tools` lists every tool; a tool parses its arguments, asks the daemon through the SDK, and answers
a small object that has a schema.  `server` speaks the protocol, with the `mcp` package, and
`stdio` serves it to the program that started `forkd mcp`.

The names and arguments of eleven tools are those of the reference's MCP server; they have options
of ours besides, so that there is one tool for each job.
"""
