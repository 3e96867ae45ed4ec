"""Environments of OpenEnv, played over their servers (docs/integrations/openenv.md)."""
