"""The one way in which Ratchet listens to HTTP: `ratchet serve`, the server of black-box agents,
`ratchet ui` and the Prometheus sink all run on `server.Server`.

`connection` bounds what a connection may hold and for how long, `server` accepts connections and
runs an ASGI application, and `guard` stands before that application: it checks names, counts
`bodies`, and turns what breaks into an answer.
"""
