"""The view of a study: live in a notebook, in a terminal, and as a page that stays."""
