"""Recipes of the models and heads that ship. They run from a clone and are not part of the installed package."""
