"""Tools that environments offer to a policy. `base` has the protocol, and runs the calls."""
