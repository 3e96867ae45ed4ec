"""Small synthetic tasks that a tiny model learns within a minute."""
