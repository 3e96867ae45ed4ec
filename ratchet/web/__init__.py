"""The HTTP server behind `ratchet serve`, black-box agents, `ratchet ui` and the Prometheus sink.

`server` accepts connections and runs an ASGI application. `connection` bounds the time and memory
of a connection. `guard` is ASGI middleware that checks host names, limits request bodies (with
`bodies`), and turns exceptions into error responses. `client` bounds the time and size of an answer
of someone else's server.
"""
