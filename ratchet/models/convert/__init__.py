"""Convert weights between Hugging Face and Megatron Core, in both directions.

The conversion maps blocks of canonical weights to rows of a rank's parameters. `tables.py` lists
the weights of each model family, `rules.py` defines the notation of the tables, `dimensions.py` has
the sizes of a model, and `megatron.py` combines them for one rank into a `WeightPiece` per block
(see `ratchet.models.weights.weight_layout`).
"""
