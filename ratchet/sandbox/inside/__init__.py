"""The code inside the sandbox's processes, which runs there without Ratchet.

`fork_server_client.py` starts it as a bare interpreter, and the trainer never imports it.
"""
