"""Recipes of the embedded models. They run from a clone and are not part of the installed package."""
