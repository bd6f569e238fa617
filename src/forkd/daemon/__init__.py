"""HTTP, and nothing but HTTP: parse, call one method of the service, render.

`app.create_app` builds the routes over any `forkd.service.api.Service`; `server.serve` listens.
"""
