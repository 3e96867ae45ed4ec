"""Tools that environments offer to a policy. `base.py` has the protocol, and runs the calls."""
