"""Configurations of other libraries as recipes: a table for each (`trl`, `verl`, `nemo_rl`,
`roll`), and one importer."""
