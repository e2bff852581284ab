"""The person's variables on a rank: description, transfer, completion, definitions, and their process
groups."""
