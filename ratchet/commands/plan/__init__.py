"""`ratchet plan`: the memory and time that a recipe will take, before it is run."""
