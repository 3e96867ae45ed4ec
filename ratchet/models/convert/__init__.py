"""Between Hugging Face and Megatron-core: which block of which canonical weight lies where in a
rank's parameters, both ways.

`tables.py` says it for each family, `rules.py` what the words of the tables mean, `dimensions.py`
how large everything is, and `megatron.py` puts them together for one rank: a `Piece` for each
block, the vocabulary of `ratchet.models.weights.weight_layout`.
"""
