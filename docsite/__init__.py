"""Builds the documentation site: `python -m docsite` (or `make docs`)."""
