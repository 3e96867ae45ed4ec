"""Tools that environments offer to a policy. `base` holds the protocol and what runs calls; any
environment may use them."""
