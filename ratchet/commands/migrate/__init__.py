"""Convert configurations of other libraries to recipes: a table of keys for each library (`trl`,
`verl`, `nemo_rl`, `roll`), and one importer."""
