"""Environments: each serves tasks and answers the policy's turns."""
