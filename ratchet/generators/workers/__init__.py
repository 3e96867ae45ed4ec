"""Generators in worker processes, and the pool that balances requests over them."""
