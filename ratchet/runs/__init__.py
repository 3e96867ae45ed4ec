"""Run directories: layout, checkpoints kept, copies in object stores."""
