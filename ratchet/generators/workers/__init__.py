"""Generators run in worker processes behind a pool that balances requests over them."""
