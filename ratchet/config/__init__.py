"""Recipes: YAML to checked configuration sections, with errors that name the line and the fix."""
