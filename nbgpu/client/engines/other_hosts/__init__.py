"""Other hosts of a cluster: how they join, are reached and come back, and how their files come here."""
