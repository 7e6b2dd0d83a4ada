"""Methods of a user's own, written from docs/how-to.md alone: nothing here is part of fedflat."""
