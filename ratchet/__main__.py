"""`python -m ratchet`, for launchers such as torchrun."""

from ratchet.cli.main import main

if __name__ == "__main__":
    main()
