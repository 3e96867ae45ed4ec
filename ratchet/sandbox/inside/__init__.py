"""The inner side of the sandbox, which `fork_server_client.py` starts as a bare interpreter.

The trainer never imports it.

    launch      the entry: finds the strongest isolation, enters it, hands over to the zygote
    zygote      waits for requests, forks a process for each, enforces time, reports how it ended
    child       gives up every right, then becomes the program
    rootfs      namespaces and the read-only root directory
    landlock, seccomp, syscalls    thin bindings to the system calls

Only the standard library, and relative imports: the interpreter that runs this has neither
site-packages nor Ratchet. Expected outputs never come here, so there is nothing in these processes
that a program could steal or overwrite to pass.
"""
