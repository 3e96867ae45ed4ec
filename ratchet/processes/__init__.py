"""Child processes: their start, the frames to and from them, their end, and the clean-up.

`spawn.py` starts a new interpreter, and `fork_server_client.py` forks a process that has imported
its modules. Executors, environment workers and reward workers use them. The sandbox does not: its
processes are hostile, and share no code with these.
"""
