"""Records of every step's groups, as Parquet files."""
