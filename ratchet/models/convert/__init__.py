"""Map weights between Hugging Face and Megatron Core, in both directions.

The map says which block of which canonical weight lies where in a rank's parameters. `tables.py`
has the weights of each family, `rules.py` defines the notation of the tables, `dimensions.py` has
all sizes, and `megatron.py` combines them for one rank into a `StagedPiece` per block (see
`ratchet.models.weights.weight_layout`).
"""
