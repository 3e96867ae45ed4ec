"""Task directories in the format of Harbor (docs/integrations/harbor.md)."""
