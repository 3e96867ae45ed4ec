"""Configuration of the algorithms and of their parts. Free of torch, so that a recipe is checked in
no time."""
