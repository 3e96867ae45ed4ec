"""What runs on the inner side: started by `slot.py` as a bare interpreter, never imported by the
trainer.

    launch      the entry: finds the strongest isolation, enters it, hands over to the zygote
    zygote      waits for requests, forks a process for each, enforces time, reports how it ended
    child       gives up every right, then becomes the program
    root        namespaces and the read-only root directory
    landlock, seccomp, kernel    thin bindings to the system calls

Only the standard library, and relative imports: the interpreter that runs this has neither
site-packages nor Ratchet. Expected outputs never come here, so there is nothing in these processes
that a program could steal or overwrite to pass.
"""
