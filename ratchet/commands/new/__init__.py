"""Write small files of the user's own that run: `ratchet new project`, `recipe`, `reward`, ..."""
